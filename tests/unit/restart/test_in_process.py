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

from moevement_core.comms.address import store_address
from moevement_core.comms.job_group import job_group
from moevement_core.comms.token import own_token
from moevement_core.rendezvous.coordinator import Coordinator, State
from moevement_core.rendezvous.interruption import GenerationStore
from moevement_core.rendezvous.relay import LocalUpstream, Relay
from moevement_core.rendezvous.roster import INTERRUPTED, STORE
from moevement_core.rendezvous.store import connect_store
from moevement_core.rendezvous.value_client import connect
from moevement_core.rendezvous.values import Values, number_of
from moevement_core.restart.generation import generation, vote
from moevement_core.restart.in_process import run_through_failures
from moevement_core.restart.training import GuardSettings, Training
from moevement_core.trainer.commit import UpdateCommit
from moevement_core.util.environment import MEMBER_ENV, STORE_ENV, SUPERVISOR_ENV
from tests.harness import run_ranks

RANKS = 2
ITERATIONS = 8
FAILS_AT = (3, 6)
"""Iterations in which rank 0 fails, while rank 1 waits for it in a reduction."""
WRONG = -1.0
STOPPED = "stopped"
_OVER = "test/over"
"""Value that a process sets when it ends, because this job has no replacement for it."""
_RELAY = "test/relay"
"""Key in the store of process groups with the address of the relay."""


class _Sums(Training):
    """Trainer that sums ones over all ranks; an aborted reduction gives a wrong number instead of an error.

    Args:
        failure: exception that rank 0 raises when it fails.
        stops: True if rank 0 stops rank 1 until rank 0 has aborted its own part of the reduction.
    """

    def __init__(self, failure: type[BaseException] = ValueError, *, stops: bool = False) -> None:
        self.sums, self.pids = list[float](), list[int]()
        self.failed = set[int]()
        self._failure, self._stops = failure, stops
        self._has_begun, self._resumed_in = False, -1
        self.commit = UpdateCommit(self._Step(self), lambda: vote(job_group()))

    class _Step:
        def __init__(self, owner: _Sums) -> None:
            self._owner, self.iteration = owner, 0

        def reduce(self) -> Mapping[str, Any]:
            owner, iteration, total = self._owner, self.iteration + 1, torch.ones(1)
            try:
                owner.meet()  # rank 0 fails while rank 1 waits for it in the reduction
                if dist.get_rank() == 0 and iteration in FAILS_AT and iteration not in owner.failed:
                    owner.failed.add(iteration)
                    owner.fail()
                dist.all_reduce(total)
            except RuntimeError:
                total.fill_(WRONG)
            return {"sum": float(total)}

        def update(self, outcome: Mapping[str, Any]) -> None:
            self._owner.sums.append(outcome["sum"])

        def boundary_copy(self) -> dict[str, Any]:
            return {}

    def meet(self) -> None:
        """Return on rank 0 once rank 1 has applied every earlier update."""
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
        job_group()
        reports: list[Any] = [None] * RANKS
        dist.all_gather_object(reports, (os.getpid(), self.iteration))
        self.pids = [pid for pid, _ in reports]
        if len({iteration for _, iteration in reports}) > 1:
            return self.sums  # a rank has committed a step that the other has not
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


def _groups() -> Any:
    """Return a client of the store of process groups."""
    address = store_address()
    assert address is not None
    return connect_store(address)


def _be_member(number: int) -> None:
    """Set the environment of a process that a supervisor has started."""
    os.environ[MEMBER_ENV] = str(number)
    os.environ[SUPERVISOR_ENV] = _groups().get(_RELAY).decode()
    sys.argv = [__file__]  # all processes of a job must have the same script


def _coordinate() -> int:
    """Coordinate the job of the other processes; return its number of generations, or 0 if it was stopped."""
    groups, values = _groups(), Values()
    values.set(STORE, os.environ[STORE_ENV])
    relay = Relay(own_token(), LocalUpstream(values))
    groups.set(_RELAY, relay.address)
    coordinator = Coordinator(values, RANKS, 100.0, print, groups=groups, lease_s=1e6)
    while coordinator.state not in (State.DONE, State.STOPPED):
        coordinator.step()
        if values.read(_OVER) is not None:
            coordinator.stop("a process has ended")
        relay.poll(0.01)
    until = time.monotonic() + 5
    while time.monotonic() < until and relay._server.callers:  # The ranks learn that the job is over.
        relay.poll(0.01)
    return coordinator.roster.generation + 1 if coordinator.state is State.DONE else 0


def _train(late: float | str) -> Any:
    number = int(os.environ["RANK"])
    if number == RANKS:
        return _coordinate()
    _be_member(number)
    if number == 1 and isinstance(late, float):
        wait = GenerationStore.wait_for_interrupted

        def wait_longer(self: GenerationStore, timeout: timedelta) -> None:
            wait(self, timeout)
            time.sleep(late)

        GenerationStore.wait_for_interrupted = wait_longer  # type: ignore[method-assign]
    return run_through_failures(_Sums(stops=late == STOPPED))


@pytest.mark.parametrize("late", [*(pytest.param(late, marks=pytest.mark.full) for late in (0.1, 1.0)), STOPPED])
def test_what_an_aborted_reduction_gives_is_never_committed(late: float | str) -> None:
    """Delay or stop rank 1, which gets the wrong result, so that its monitoring thread acts late."""
    *ranks, coordinator = run_ranks(_train, RANKS + 1, late, init_process_group=False)
    assert [rank.result for rank in ranks] == [[float(RANKS)] * ITERATIONS] * RANKS
    assert coordinator.result == 1 + len(FAILS_AT)


def _end_abruptly() -> Any:
    number = int(os.environ["RANK"])
    if number == RANKS:
        return _coordinate()
    _be_member(number)
    try:
        return run_through_failures(_Sums(KeyboardInterrupt))
    except SystemExit:  # the job was stopped while this rank waited for the next generation
        return None
    except KeyboardInterrupt:
        values = connect()
        result = number_of(values.read(INTERRUPTED)) >= 0, dist.is_initialized()
        values.set(_OVER, "")
        return result


def test_a_process_that_is_to_end_interrupts_the_others_before_it_drops_its_groups() -> None:
    """Check that the process reports the interruption first, because the loss of its groups aborts other ranks."""
    ended, interrupted, coordinator = run_ranks(_end_abruptly, RANKS + 1, init_process_group=False)
    assert ended.result == (True, True)
    assert interrupted.result is None
    assert coordinator.result == 0
