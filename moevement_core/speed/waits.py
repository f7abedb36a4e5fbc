"""Times in which a rank waits for other ranks in torch's collectives, so that its own work can be timed without them.

The functions of ``torch.distributed`` call methods of ``ProcessGroup``, and wait in ``Work.wait``. Both classes get
methods that note when a call begins and ends on the device's current stream. On a CPU the notes are readings of the
clock. On a GPU they are CUDA events, so a collective that only waits on the stream is noticed too.

The time of a collective counts as waiting as a whole: the transfer of its data, and the wait for ranks that are late.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from moevement_core.device import Device, DeviceEvent

Wait = tuple[DeviceEvent, DeviceEvent]
"""Begin and end of a wait."""
COLLECTIVES = (
    "_allgather_base", "_end_coalescing", "_reduce_scatter_base", "all_gather_single", "all_gather_single_coalesced",
    "all_to_all_single", "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce",
    "allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "broadcast", "gather", "recv", "recv_anysource",
    "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced", "scatter", "send",
)  # fmt: skip
"""Methods of ``ProcessGroup`` that communicate; a version of torch has some of them."""


class Waits:
    """Waits of this process. :data:`waits` is the only instance, because torch's classes are wrapped once."""

    def __init__(self) -> None:
        self._device: Device | None = None
        """Device whose streams are timed; None while nothing is timed."""
        self._noted: list[Wait] = []
        self._is_installed = False

    def begin(self, device: Device) -> None:
        """Note waits from now on, in addition to those that :meth:`take` has not returned yet."""
        if not self._is_installed:
            self._is_installed = True
            for name in COLLECTIVES:
                if (method := getattr(dist.ProcessGroup, name, None)) is not None:
                    setattr(dist.ProcessGroup, name, self._timed(method))
            dist.Work.wait = self._timed(dist.Work.wait)  # type: ignore[method-assign]
        self._device = device

    def take(self) -> list[Wait]:
        """Return the waits that were noted since the last call."""
        noted, self._noted = self._noted, []
        return noted

    def end(self) -> None:
        """Note no more waits, and drop those that :meth:`take` has not returned."""
        self._device, self._noted = None, []

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Return a context in which this rank waits for others in another way than through torch."""
        device = self._device
        if device is None:
            yield
            return
        begun = _mark(device)
        yield
        self._noted.append((begun, _mark(device)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*args: Any, **options: Any) -> Any:
            device = self._device
            if device is None or not _is_training():
                return method(*args, **options)
            begun = _mark(device)
            result = method(*args, **options)
            self._noted.append((begun, _mark(device)))
            return result

        return timed


def _mark(device: Device) -> DeviceEvent:
    event = device.event(timing=True)
    event.record()
    return event


def _is_training() -> bool:
    """Return True on the main thread, and on torch's own threads, which run the backward pass on a GPU."""
    thread = threading.current_thread()
    return thread is threading.main_thread() or isinstance(thread, threading._DummyThread)


waits = Waits()
