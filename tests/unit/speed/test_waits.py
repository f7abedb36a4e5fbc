"""Clock of a rank's own work: collectives of torch and other waits for ranks do not count."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, override

import pytest
import torch
import torch.distributed as dist

from moevement_core.device import CpuDevice, DeviceEvent
from moevement_core.speed.phases import PhaseClock
from moevement_core.speed.waits import waits
from tests.harness import run_ranks


class Ticks(CpuDevice):
    """Device whose clock shows one second more at each reading."""

    def __init__(self) -> None:
        super().__init__()
        self.readings = 0
        self.is_done = True

    @override
    def event(self, timing: bool = False, *, sleeps: bool = False) -> DeviceEvent:
        assert timing
        return _Tick(self)


class _Tick(DeviceEvent):
    def __init__(self, device: Ticks) -> None:
        self._device, self._at = device, 0

    def record(self, stream: Any = None) -> None:
        self._device.readings += 1
        self._at = self._device.readings

    def synchronize(self) -> None:
        raise AssertionError("the training thread must not wait for the device")

    def order_before(self, stream: Any = None) -> None:
        raise AssertionError("nothing has to be ordered")

    def query(self) -> bool:
        return self._device.is_done

    def elapsed_ms(self, end: DeviceEvent) -> float:
        assert isinstance(end, _Tick)
        return 1e3 * (end._at - self._at)


def _collectives(rank: int) -> list[tuple[str, Callable[[], Any]]]:
    value, parts = torch.ones(4), [torch.ones(4), torch.ones(4)]
    return [
        ("all_reduce", lambda: dist.all_reduce(value)),
        ("all_reduce, asynchronous", lambda: dist.all_reduce(value, async_op=True).wait()),
        ("broadcast", lambda: dist.broadcast(value, 1)),
        ("all_gather", lambda: dist.all_gather(parts, value)),
        ("all_gather_into_tensor", lambda: dist.all_gather_into_tensor(torch.empty(8), value)),
        ("reduce_scatter_tensor", lambda: dist.reduce_scatter_tensor(torch.empty(2), value)),
        ("all_to_all_single", lambda: dist.all_to_all_single(torch.empty(4), value)),
        ("barrier", dist.barrier),
        ("send and receive", lambda: dist.send(value, 0) if rank else dist.recv(value, 1)),
        ("batch of sends", lambda: [work.wait() for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, value, 1 - rank), dist.P2POp(dist.irecv, torch.empty(4), 1 - rank)]
        )]),
    ]  # fmt: skip


def _own_time_is_what_lies_between_collectives() -> None:
    rank = dist.get_rank()
    for name, collective in _collectives(rank):
        clock = PhaseClock(device := Ticks())
        assert clock.begin() is None
        collective()
        noted = device.readings - 1
        assert noted >= 2, f"{name}: nothing was noted"
        clock.begin_update()
        with waits.waiting():
            pass
        clock.end()
        seconds = clock.begin()
        # Between two readings of the clock lies a second: every second one of them is a wait.
        assert seconds == (noted // 2 + 1, 2), f"{name}: {seconds} of {noted}"
        clock.interrupted()


def test_waits_in_collectives_of_torch_do_not_count() -> None:
    run_ranks(_own_time_is_what_lies_between_collectives, 2)


def test_an_iteration_that_was_interrupted_has_no_time() -> None:
    clock = PhaseClock(Ticks())
    clock.begin()
    clock.begin_update()
    assert clock.begin() is None
    clock.begin_update()
    clock.end()
    clock.interrupted()
    assert clock.begin() is None
    clock.interrupted()


def test_an_iteration_that_the_device_has_not_completed_has_no_time() -> None:
    clock = PhaseClock(device := Ticks())
    for is_done in (False, True):
        clock.begin()
        clock.begin_update()
        clock.end()
        device.is_done = is_done
        assert (clock.begin() is not None) == is_done
    clock.interrupted()


@pytest.mark.parametrize("is_timed", [True, False])
def test_waits_of_background_threads_and_between_iterations_do_not_count(is_timed: bool) -> None:
    clock = PhaseClock(Ticks())
    clock.begin()
    if not is_timed:
        clock.interrupted()
    backend = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=30))
    group = dist.ProcessGroup(dist.HashStore(), 0, 1)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)

    def reduce() -> None:
        group.allreduce([torch.ones(1)]).wait()

    if is_timed:
        thread = threading.Thread(target=reduce)
        thread.start()
        thread.join()
    else:
        reduce()
    assert waits.take() == []
    clock.interrupted()
