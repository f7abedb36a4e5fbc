"""``pretrain()`` that is entered again after every failure, in the processes that are left and in a spare.

Each generation runs under a :class:`~megatron.moevement.restart.guard.Guard`. After a failure all ranks leave theirs
and wait for the next roster of the coordinator, so the number of processes is not fixed at the start, and a spare that
dies while it waits interrupts nobody.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from nvidia_resiliency_ext.inprocess.health_check import CudaHealthCheck
from nvidia_resiliency_ext.shared_utils.log_manager import LogConfig

from megatron.moevement.platform import is_cpu
from megatron.moevement.restart import injection, megatron_state
from megatron.moevement.restart.abort import AbortAll
from megatron.moevement.restart.environment import MEMBER_ENV, NODE_ENV
from megatron.moevement.restart.guard import Guard, Outcome
from megatron.moevement.restart.store import GenerationStore, connect, connect_breakable, store_address
from megatron.moevement.runtime.job import current_job, start_job
from moevement_core.errors import ConfigError, DataError, JobStopped, RunRecordError
from moevement_core.injection import Fault, Phase
from moevement_core.rendezvous.member import Member
from moevement_core.rendezvous.roster import MemberInfo, Roster
from moevement_core.rendezvous.status_page import wait_until_held

NOTICED_S = 2.0
"""How long the death of a process takes to be noticed at most; its broken connections are seen at once."""


@dataclass
class Generation:
    """What this process knows of the generation it is in."""

    roster: Roster
    rank: int
    aborting: bool = False
    """Whatever fails now fails because everything is being aborted."""
    interrupted_at: float = 0.0
    """When this process was interrupted in the generation before; 0 if it was not in it."""
    aborted_at: float = 0.0
    """When this one was; seconds since the epoch, both."""
    guard: Guard | None = None
    """Of this generation, while it runs."""

    def abort(self) -> None:
        """Everything is being aborted from now on."""
        self.aborting = True
        self.aborted_at = time.time()


_generation: Generation | None = None


def generation() -> Generation | None:
    """The one of this process; nothing in a job that ends with its first failure."""
    return _generation


def is_aborting() -> bool:
    """Whether errors of communication are those of an abort, and nothing to report."""
    return _generation is not None and _generation.aborting


def is_fault_of_others() -> bool:
    """Whether an error of communication came from a failure somewhere else; waits a moment for that to be noticed."""
    deadline = time.monotonic() + NOTICED_S
    while _generation is not None and not _generation.aborting and time.monotonic() < deadline:
        time.sleep(0.02)
    return is_aborting()


def atomic() -> Any:
    """A section that no restart interrupts, and that must not wait for any other process; entered while held."""
    wait_until_held()
    return _generation.guard.atomic() if _generation is not None and _generation.guard is not None else nullcontext()


def waiting_for_others() -> Any:
    """This rank waits for others that are at work; who hangs there is noticed there."""
    if _generation is None or _generation.guard is None:
        return nullcontext()
    return _generation.guard.waiting_for_others()


def working() -> Any:
    """Within :func:`waiting_for_others`: this rank is one of those that are at work."""
    return _generation.guard.working() if _generation is not None and _generation.guard is not None else nullcontext()


def restart_in_process(original: Callable[..., Any]) -> Callable[..., Any]:
    """``pretrain`` for a job that goes on after failures; unchanged in any other."""

    @functools.wraps(original)
    def pretrain(*args: Any, store: Any = None, **kwargs: Any) -> Any:
        if MEMBER_ENV not in os.environ:
            return original(*args, store=store, **kwargs)
        return _Restarts(original, args, kwargs).run()

    return pretrain


class _Restarts:
    def __init__(self, pretrain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        address = store_address()
        assert address is not None
        self._pretrain, self._args, self._kwargs = pretrain, args, kwargs
        self._address = address
        self._store = connect(address)
        self._member = Member(self._store, _introduction())
        self._reason = ""

    def run(self) -> Any:
        """To the end of the job."""
        global _generation
        # It logs every interruption at every level; what an operator should know the coordinator reports.
        logging.getLogger(LogConfig.name).disabled = True
        self._member.join()
        while True:
            try:
                roster, rank = self._member.wait_for_rank()
                before = _generation
                _generation = Generation(roster, rank, interrupted_at=before.aborted_at if before is not None else 0.0)
                megatron_state.take_rank(rank, roster.devices.get(rank))
                ended = self._enter(_generation)
            except JobStopped as stopped:
                sys.exit(str(stopped) or None)
            if ended is Outcome.INTERRUPTED:
                self._clear_away()
                job = current_job()
                self._member.leave(self._reason, job.iteration, had_recovered=job.resumed_in == roster.generation)
                continue
            megatron_state.end_data_workers()
            if isinstance(ended, SystemExit):
                raise ended
            return ended

    def _enter(self, now: Generation) -> Any:
        """One generation: returns what ``pretrain`` returned, the planned exit that it ended with, or INTERRUPTED."""
        from megatron.training import get_args

        args = get_args()
        injection.begin(Fault.parse(text) for text in args.moevement_inject)
        world = len(now.roster.ranks)
        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(now.rank), str(world)
        self._reason = ""
        groups_store, groups_ports = connect_breakable(self._address)
        guard = Guard(
            now.rank,
            world,
            GenerationStore(connect(self._address), now.roster.generation),
            AbortAll(self._address[1], groups_ports, now.abort),
            args.inprocess_soft_timeout,
            args.inprocess_monitor_thread_interval,
        )

        def body() -> Any:
            store = dist.PrefixStore(f"generation/{now.roster.generation}/groups", groups_store)
            try:
                if not is_cpu():
                    CudaHealthCheck(timedelta(seconds=10))(None)
                if now.roster.generation > 0:
                    injection.at(Phase.GROUPS)
                ended = self._run(store)
                self._member.finished()
                with guard.waiting_for_others():
                    self._member.wait_for_end()
            except JobStopped as stopped:
                raise SystemExit(str(stopped)) from None
            except (ConfigError, DataError, RunRecordError) as error:
                if current_job().begun or is_aborting():
                    raise
                raise _Unfit(error) from None  # it would be the same again
            except Exception as error:
                if not is_fault_of_others():
                    self._reason = f"rank {now.rank}: {type(error).__name__}: {_first_line(error)}"
                    traceback.print_exc()
                raise
            return ended

        now.guard = guard
        try:
            ended = guard.run(body)
            if ended is Outcome.INTERRUPTED and guard.hang is not None:
                self._reason = f"rank {now.rank}: {guard.hang}"
            return ended
        except _Unfit as unfit:
            raise unfit.error from None
        finally:
            now.guard = None

    def _run(self, store: Any) -> Any:
        try:
            return self._pretrain(*self._args, store=store, **self._kwargs)
        except SystemExit as exit_:
            if exit_.code in (0, None):
                return exit_  # a planned exit is no failure: all ranks come to it
            raise

    def _clear_away(self) -> None:
        """What the interruption may have left, on a rank that goes on."""
        torch.set_grad_enabled(True)
        megatron_state.forget_groups()
        job = current_job()
        if job.sparse is not None:
            job.sparse.disconnect()
        megatron_state.forget_generation(job)
        if not job.begun:  # nothing that could be kept
            start_job()


class _Unfit(BaseException):
    """A mistake of the user's, which another attempt would meet again."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def _introduction() -> MemberInfo:
    host = socket.gethostname()
    devices = 0 if is_cpu() else torch.cuda.device_count()
    return MemberInfo(
        int(os.environ[MEMBER_ENV]),
        os.getpid(),
        host,
        os.environ.get(NODE_ENV, host),
        int(os.environ.get("LOCAL_RANK", "0")),
        devices,
    )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]
