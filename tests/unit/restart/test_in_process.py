"""Ranks that are interrupted within a step: real processes, stores, monitoring threads and aborts, over gloo."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, override

import pytest
import torch
import torch.distributed as dist

from moevement_core.rendezvous.coordinator import Coordinator, State
from moevement_core.rendezvous.store import GenerationStore, connect, interrupt_in, store_address
from moevement_core.restart.generation import generation
from moevement_core.restart.in_process import GuardSettings, Training, run_through_failures
from moevement_core.trainer.commit import UpdateCommit
from moevement_core.util.environment import MEMBER_ENV
from tests.harness import run_ranks

RANKS = 2
ITERATIONS = 8
FAILS_AT = (3, 6)
"""Iterations in which rank 0 fails, while rank 1 waits for it in a reduction."""
WRONG = -1.0
STOPPED = "stopped"
_OVER = "test/over"
"""In the job's store: a process has ended that nobody replaces here."""


class _Sums(Training):
    """A trainer that adds up ones over all ranks. A reduction that was aborted gives a wrong number, and no error.

    Args:
        failure: what rank 0 raises where it fails.
        stops: whether rank 0 has rank 1 stopped until it has aborted its own part of the reduction.
    """

    def __init__(self, failure: type[BaseException] = ValueError, *, stops: bool = False) -> None:
        self.sums, self.pids = list[float](), list[int]()
        self.failed = set[int]()
        self._failure, self._stops = failure, stops
        self._has_begun, self._resumed_in = False, -1
        self.commit = UpdateCommit(self._Step(self), lambda: None)

    class _Step:
        def __init__(self, its: _Sums) -> None:
            self._its, self.iteration = its, 0

        def reduce(self) -> Mapping[str, Any]:
            its, iteration, total = self._its, self.iteration + 1, torch.ones(1)
            try:
                its.meet()  # whoever fails does so while the other one waits for it here
                if dist.get_rank() == 0 and iteration in FAILS_AT and iteration not in its.failed:
                    its.failed.add(iteration)
                    its.fail()
                dist.all_reduce(total)
            except RuntimeError:
                total.fill_(WRONG)
            return {"sum": float(total)}

        def update(self, outcome: Mapping[str, Any]) -> None:
            self._its.sums.append(outcome["sum"])

        def boundary_copy(self) -> dict[str, Any]:
            return {}

    def meet(self) -> None:
        """Return on rank 0 when rank 1 has made every update before."""
        if dist.get_rank() == 0:
            dist.recv(torch.ones(1), 1)
        else:
            dist.send(torch.ones(1), 0)

    def fail(self) -> None:
        if self._stops:
            os.kill(self.pids[1], signal.SIGSTOP)
        raise self._failure("a failure of rank 0")

    @property
    @override
    def watching(self) -> GuardSettings:
        return GuardSettings(hang_s=600.0)

    @override
    def enter(self, store: Any) -> list[float]:
        rank = int(os.environ["RANK"])
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=100))
        told: list[Any] = [None] * RANKS
        dist.all_gather_object(told, (os.getpid(), self.iteration))
        self.pids = [pid for pid, _ in told]
        if len({iteration for _, iteration in told}) > 1:
            return self.sums  # a rank has made a step that the other one has not
        self._has_begun = True
        now = generation()
        assert now is not None
        self._resumed_in = now.roster.generation
        while self.iteration < ITERATIONS:
            self.commit.step(self.iteration + 1)
        return self.sums

    @override
    def interrupted(self) -> None:
        if self._stops and int(os.environ["RANK"]) == 0:  # its communication is aborted
            os.kill(self.pids[1], signal.SIGCONT)

    @property
    @override
    def has_begun(self) -> bool:
        return self._has_begun

    @property
    @override
    def iteration(self) -> int:
        return self.commit._trainer.iteration

    @property
    @override
    def resumed_in(self) -> int:
        return self._resumed_in


def _coordinate() -> int:
    """Coordinate the job of the other processes; returns in how many generations it was done, 0 if it was stopped."""
    address = store_address()
    assert address is not None
    store = connect(address)
    coordinator = Coordinator(store, RANKS, 100.0, print, interrupt=interrupt_in(connect(address)), lease_s=1e6)
    while coordinator.state not in (State.DONE, State.STOPPED):
        coordinator.step()
        if store.check([_OVER]):
            coordinator.stop("a process has ended")
        time.sleep(0.01)
    return coordinator.roster.generation + 1 if coordinator.state is State.DONE else 0


def _train(late: float | str) -> Any:
    number = int(os.environ["RANK"])
    if number == RANKS:
        return _coordinate()
    os.environ[MEMBER_ENV] = str(number)
    sys.argv = [__file__]  # the script of this process, which a job compares
    if number == 1 and isinstance(late, float):
        wait = GenerationStore.wait_for_interrupted

        def wait_longer(self: GenerationStore, timeout: timedelta) -> None:
            wait(self, timeout)
            time.sleep(late)

        GenerationStore.wait_for_interrupted = wait_longer  # type: ignore[method-assign]
    return run_through_failures(_Sums(stops=late == STOPPED))


@pytest.mark.parametrize("late", [*(pytest.param(late, marks=pytest.mark.full) for late in (0.1, 1.0)), STOPPED])
def test_what_an_aborted_reduction_gives_is_never_committed(late: float | str) -> None:
    """However late the monitoring thread of the rank is that it is given to."""
    *ranks, coordinator = run_ranks(_train, RANKS + 1, late, init_process_group=False)
    assert [rank.result for rank in ranks] == [[float(RANKS)] * ITERATIONS] * RANKS
    assert coordinator.result == 1 + len(FAILS_AT)


def _end_abruptly() -> Any:
    number = int(os.environ["RANK"])
    if number == RANKS:
        return _coordinate()
    os.environ[MEMBER_ENV] = str(number)
    sys.argv = [__file__]  # the script of this process, which a job compares
    try:
        return run_through_failures(_Sums(KeyboardInterrupt))
    except SystemExit:  # the job was stopped while this rank waited for the next generation
        return None
    except KeyboardInterrupt:
        address = store_address()
        assert address is not None
        store = connect(address)
        result = GenerationStore(store, 0).is_interrupted(), dist.is_initialized()
        store.set(_OVER, "")
        return result


def test_a_process_that_is_to_end_interrupts_the_others_before_it_drops_its_groups() -> None:
    """To drop them is an abort, of which other ranks have to find word in the store."""
    ended, interrupted, coordinator = run_ranks(_end_abruptly, RANKS + 1, init_process_group=False)
    assert ended.result == (True, True)
    assert interrupted.result is None
    assert coordinator.result == 0
