"""Stream, event, pinned host memory and memory figures behind one small interface.

The engine and the Megatron binding use this instead of ``torch.cuda``, so one code path serves an NVIDIA GPU and a
machine without one. On the CPU a stream is the calling thread: work is done when the call that issued it returns,
so waiting is free and an event is a clock reading.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import resource
import socket
import time
import weakref
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import psutil
import torch

MOST_AT_ONCE = 2 << 30
"""Bytes of host memory that are allocated in one call, by those who can use several pieces. Page-locking goes at some
GB/s for all ranks of a node together, and a thread that is in one call for a minute is taken to hang."""


class Event(ABC):
    """A point in the work of a stream."""

    @abstractmethod
    def record(self, stream: Any = None) -> None:
        """Mark the present end of ``stream`` (default: the current stream)."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the calling thread until everything before the mark is done."""

    @abstractmethod
    def hold_back(self, stream: Any = None) -> None:
        """Let later work of ``stream`` (default: the current stream) wait for the mark; blocks no thread."""

    @abstractmethod
    def query(self) -> bool:
        """Return whether everything before the mark is done; never blocks."""

    @abstractmethod
    def elapsed_ms(self, end: Event) -> float:
        """Milliseconds from this mark to ``end``; both must have been recorded with ``timing=True``."""


class Device(ABC):
    """Accelerator as the copy engine, the boundary log and the benchmarks see it."""

    kind: str
    torch_device: torch.device

    @property
    def pci_address(self) -> str | None:
        """Address on the PCI bus, as ``0000:1b:00.0``; None if the device is on none."""
        return None

    @abstractmethod
    def stream(self) -> Any:
        """A new side stream."""

    @abstractmethod
    def current_stream(self) -> Any:
        """The stream on which the calling thread issues its work."""

    @abstractmethod
    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Issue the work of a ``with`` block on ``stream``."""

    @abstractmethod
    def event(self, timing: bool = False, *, sleeps: bool = False) -> Event:
        """Return a new event.

        Args:
            timing: whether it is used for :meth:`Event.elapsed_ms`.
            sleeps: whether a thread that waits for it sleeps, as a background thread should. Else it spins, which takes
                a processor from whoever needs it, and notices the mark some 50 microseconds sooner.
        """

    @abstractmethod
    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between device and host memory of equal length on the current stream; may return before it is done."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block until all work of this device is done."""

    @abstractmethod
    def use_in_this_thread(self) -> None:
        """Make it the current device of the calling thread: a new thread begins with the first one of the host."""

    @abstractmethod
    def host_empty(self, nbytes: int) -> torch.Tensor:
        """Return ``nbytes`` of host memory as uint8, page-locked where the device can copy into it faster.

        It is shared with processes that are forked later, and begins at a page: see :func:`shared_memory`.

        Raises:
            RuntimeError: there is not so much memory, or it cannot be page-locked.
        """

    @abstractmethod
    def memory_bytes(self) -> int:
        """Bytes of device memory in use by this process (on the CPU: its resident set)."""

    @abstractmethod
    def release_cached(self) -> int:
        """Give back device memory that torch keeps and nobody uses; returns the bytes that are free then.

        (On the CPU there is none to give back, and free is what the host can still give.)
        """

    @abstractmethod
    def peak_memory_bytes(self) -> int:
        """The largest :meth:`memory_bytes` of this process so far."""


def shared_memory(nbytes: int) -> torch.Tensor:
    """Return ``nbytes`` of zeroed host memory as uint8, in whole pages of a mapping of its own.

    A fork copies private pages that are locked for a device, or marks them to be copied at the next store: data workers
    would each get a copy of all snapshots, at the speed of a memory copy, or the pages that the device writes to would
    be other ones than this process reads. Pages of a shared mapping stay the same in both.

    Raises:
        RuntimeError: there is not so much memory.
    """
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    try:
        mapped = mmap.mmap(-1, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise RuntimeError(f"{nbytes} bytes of host memory cannot be mapped: {error.strerror}") from None
    return torch.frombuffer(mapped, dtype=torch.uint8)[:nbytes]


class _CpuStream:
    """The calling thread; present so that callers need no special case."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for: issued work is already done."""

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for: issued work is already done."""

    def synchronize(self) -> None:
        """Nothing to wait for: issued work is already done."""

    def query(self) -> bool:
        """Return True: issued work is already done."""
        return True


class _CpuEvent(Event):
    def __init__(self) -> None:
        self._recorded_s: float | None = None

    def record(self, stream: Any = None) -> None:
        self._recorded_s = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def hold_back(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_ms(self, end: Event) -> float:
        assert isinstance(end, _CpuEvent)
        if self._recorded_s is None or end._recorded_s is None:
            raise RuntimeError("elapsed_ms needs two recorded events; call record() on both first")
        return (end._recorded_s - self._recorded_s) * 1e3


class CpuDevice(Device):
    """A machine without an accelerator."""

    kind = "cpu"
    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        self._stream = _CpuStream()

    def stream(self) -> _CpuStream:
        return _CpuStream()

    def current_stream(self) -> _CpuStream:
        return self._stream

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext(stream)

    def event(self, timing: bool = False, *, sleeps: bool = False) -> Event:
        return _CpuEvent()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def synchronize(self) -> None:
        pass

    def use_in_this_thread(self) -> None:
        pass

    def host_empty(self, nbytes: int) -> torch.Tensor:
        return shared_memory(nbytes)

    def memory_bytes(self) -> int:
        return int(psutil.Process().memory_info().rss)

    def release_cached(self) -> int:
        return int(psutil.virtual_memory().available)

    def peak_memory_bytes(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class _CudaEvent(Event):
    def __init__(self, timing: bool, *, sleeps: bool) -> None:
        self._event = torch.cuda.Event(enable_timing=timing, blocking=sleeps)

    def record(self, stream: Any = None) -> None:
        self._event.record(stream or torch.cuda.current_stream())

    def synchronize(self) -> None:
        self._event.synchronize()

    def hold_back(self, stream: Any = None) -> None:
        (stream or torch.cuda.current_stream()).wait_event(self._event)

    def query(self) -> bool:
        return bool(self._event.query())

    def elapsed_ms(self, end: Event) -> float:
        assert isinstance(end, _CudaEvent)
        return float(self._event.elapsed_time(end._event))


class CudaDevice(Device):
    """The CUDA device that is current when this object is made."""

    kind = "cuda"

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())

    @property
    def pci_address(self) -> str:
        properties: Any = torch.cuda.get_device_properties(self.torch_device)
        return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.torch_device)

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.torch_device)

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def event(self, timing: bool = False, *, sleeps: bool = False) -> Event:
        return _CudaEvent(timing, sleeps=sleeps)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def use_in_this_thread(self) -> None:
        torch.cuda.set_device(self.torch_device)

    def host_empty(self, nbytes: int) -> torch.Tensor:
        # Not torch's pinned memory: its allocator rounds up to a power of two, and never gives back.
        self.use_in_this_thread()  # else a thread that serves peers would make a context on the host's first device
        memory = shared_memory(nbytes)
        if nbytes:
            runtime: Any = torch.cuda.cudart()
            address = memory.data_ptr()
            assert address % mmap.PAGESIZE == 0
            if (error := int(runtime.cudaHostRegister(address, nbytes, 0))) != 0:
                clear_last_error()
                raise RuntimeError(f"{nbytes} bytes of host memory cannot be page-locked: CUDA error {error}")
            weakref.finalize(memory, runtime.cudaHostUnregister, address)  # so whoever has views of it keeps it too
        return memory

    def memory_bytes(self) -> int:
        return int(torch.cuda.memory_allocated(self.torch_device))

    def release_cached(self) -> int:
        gc.collect()  # what an interrupted step has left refers to itself in circles
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    def peak_memory_bytes(self) -> int:
        return int(torch.cuda.max_memory_allocated(self.torch_device))


def clear_last_error(loaded: Path = Path("/proc/self/maps")) -> bool:
    """Take back the last error of this thread from CUDA's runtime; return whether there is a runtime.

    The runtime keeps an error until somebody asks for it. Torch asks after its next kernel and raises it as that
    kernel's; its own binding of the runtime has no function that only asks.

    Args:
        loaded: where the system lists the libraries of this process.
    """
    names = {line.split()[-1] for line in loaded.read_text().splitlines() if "libcudart.so" in line}
    for name in names:
        ctypes.CDLL(name).cudaGetLastError()
    return bool(names)


def release_cached_memory() -> int | None:
    """Give back device memory that nobody uses, for communicators, which do not allocate through torch.

    Returns:
        Bytes of device memory that are free then; None if this process has used no device yet.
    """
    if torch.cuda.is_available() and not torch.cuda.is_initialized():
        return None  # a device would be taken that may be another rank's
    return current_device().release_cached()


def current_device() -> Device:
    """The device of this process: CUDA where there is one, else the CPU."""
    return CudaDevice() if torch.cuda.is_available() else CpuDevice()


def visible_devices() -> tuple[str, ...]:
    """Return the identities of the accelerators that this process sees, in the order of the numbers that it gives them.

    A device has one identity, whatever number a process gives it. No context is made on any device. Not run on a GPU.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return tuple(_identity(number) for number in range(count))


def _identity(number: int) -> str:
    """Return a device's UUID as NVML writes it; a name on this host where torch does not know it."""
    if (uuid := getattr(torch.cuda.get_device_properties(number), "uuid", None)) is not None:
        return f"GPU-{uuid}"
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return f"{socket.gethostname()}/{visible[number] if number < len(visible) and visible[number] else number}"
