"""A rank that hangs is interrupted and reports where it hung. Afterwards torch counts process groups from zero."""

from __future__ import annotations

import ctypes
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist
from nvidia_resiliency_ext.inprocess.abort import Abort
from nvidia_resiliency_ext.inprocess.state import FrozenState

from moevement_core.rendezvous.interruption import GenerationStore
from moevement_core.rendezvous.values import Values
from moevement_core.restart.groups import forget_groups
from moevement_core.restart.guard import GenerationEnd, Guard
from tests.values import LocalValues


def signals() -> GenerationStore:
    """Return the record of interruptions of generation 0."""
    client = LocalValues(Values())
    return GenerationStore(0, client, lambda: client)


class _Free(Abort):
    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def __call__(self, state: FrozenState) -> FrozenState:
        self._lock.release()
        return state


def test_a_rank_that_hangs_is_interrupted_and_names_the_place() -> None:
    lock = threading.Lock()
    lock.acquire()
    guard = Guard(0, 1, signals(), _Free(lock), hang_s=0.5, interval_s=0.05)
    assert guard.hang is None

    def waits_for_ever() -> None:
        lock.acquire()
        while True:  # the interruption is raised in here
            pass

    assert guard.run(waits_for_ever) is GenerationEnd.INTERRUPTED
    assert guard.hang is not None
    assert " 0.5 s " in guard.hang
    assert "waits_for_ever (test_guard.py:" in guard.hang


def test_what_counts_as_a_hang_depends_on_what_a_rank_does() -> None:
    """Allow long calls before the first iteration and while other ranks work, but not while ranks connect."""
    store = signals()
    guard = Guard(0, 1, store, _Free(threading.Lock()), hang_s=60.0, interval_s=0.5, set_up_s=300.0)
    limits = [guard.limit_s]
    with guard.waiting_for_others():
        limits.append(guard.limit_s)
        with guard.working():
            limits.append(guard.limit_s)
    with guard.connecting():
        limits.append(guard.limit_s)
    limits.append(guard.limit_s)
    assert limits == [300.0, 600.0, 300.0, 60.0, 300.0]
    guard.expect_progress()
    assert guard.limit_s == 60.0
    with guard.waiting_for_others(), guard.working():
        assert guard.limit_s == 60.0


@pytest.mark.parametrize("set_up_s", [None, 600.0])
def test_a_long_call_before_the_first_iteration_is_no_hang(set_up_s: float | None) -> None:
    """Run a call during which the main thread executes no Python code, as page-locking of host memory does."""
    lock = threading.Lock()
    lock.acquire()
    store = signals()
    guard = Guard(0, 1, store, _Free(lock), hang_s=0.5, interval_s=0.05, set_up_s=set_up_s)

    def sets_up() -> str:
        ctypes.CDLL(None).sleep(2)
        while set_up_s is None:  # the interruption is raised in here
            pass
        return "trained"

    assert guard.run(sets_up) == ("trained" if set_up_s else GenerationEnd.INTERRUPTED)
    assert (guard.hang is None) == (set_up_s is not None)


def test_groups_are_named_from_the_beginning_after_an_interruption() -> None:
    """Let the creation of the default group fail. That increases torch's count of groups, but leaves no group."""
    assert not dist.is_initialized()
    with pytest.raises(dist.DistError):
        dist.init_process_group(
            "gloo", store=dist.HashStore(), rank=0, world_size=2, timeout=timedelta(milliseconds=100)
        )
    assert not dist.is_initialized()
    forget_groups()
    assert dist.distributed_c10d._world.group_count == 0
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.new_group([0])
    forget_groups()
    assert not dist.is_initialized()
    assert dist.distributed_c10d._world.group_count == 0
