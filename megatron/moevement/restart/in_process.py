"""``pretrain()`` that is entered again after every failure, in the processes that are left and in a spare.

The restart wrapper of nvidia-resiliency-ext notices failures and hangs, aborts communication, interrupts the trainer
and checks health. It is left after every failure and a new one entered, with the ranks that the launcher's coordinator
gives out: so the number of processes is not fixed when the first wrapper is entered, and a spare that dies while it
waits interrupts nobody. (The wrapper's own way to give out ranks, ``FillGaps``, also leaves a rank empty when a spare
dies together with it.)
"""

from __future__ import annotations

import functools
import logging
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from nvidia_resiliency_ext import inprocess
from nvidia_resiliency_ext.inprocess.finalize import Finalize
from nvidia_resiliency_ext.inprocess.state import FrozenState
from nvidia_resiliency_ext.shared_utils.log_manager import LogConfig

from megatron.moevement.platform import is_cpu
from megatron.moevement.restart import megatron_state
from megatron.moevement.restart.abort import AbortAll
from megatron.moevement.restart.environment import MEMBER_ENV, NODE_ENV
from megatron.moevement.restart.store import GenerationStore, connect, store_address
from megatron.moevement.runtime.job import current_job, start_job
from moevement_core.errors import JobStopped
from moevement_core.rendezvous.member import Member
from moevement_core.rendezvous.roster import Card, Roster

NOTICED_S = 1.0
"""How long the death of a process takes to be noticed at most; its broken connections are seen at once."""


class Leave(BaseException):
    """Out of the wrapper, after everything was aborted; not an error, so that nothing on the way catches it."""


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
    call: Any = None
    """The wrapper's handle, for sections that must not be interrupted."""


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
    """A section that no restart interrupts, and that must not wait for any other process."""
    return _generation.call.atomic() if _generation is not None and _generation.call is not None else nullcontext()


@contextmanager
def waiting_is_right() -> Iterator[None]:
    """This rank waits for others that are at work, for as long as it takes; who hangs there is noticed there."""
    if _generation is None or _generation.call is None:
        yield
        return
    with _generation.call.disable_hang_protection():
        yield


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
        host = socket.gethostname()
        member = int(os.environ[MEMBER_ENV])
        self._member = Member(self._store, Card(member, os.getpid(), host, os.environ.get(NODE_ENV, host)))
        self._reason = ""

    def run(self) -> Any:
        """To the end of the job."""
        global _generation
        # It tells of every interruption at every level; what an operator should know is told by the coordinator.
        logging.getLogger(LogConfig.name).disabled = True
        self._member.join()
        while True:
            try:
                roster, rank = self._member.wait_for_rank()
            except JobStopped as stopped:
                sys.exit(str(stopped) or None)
            before = _generation
            _generation = Generation(roster, rank, interrupted_at=before.aborted_at if before is not None else 0.0)
            megatron_state.take_rank(rank)
            try:
                ended = self._enter()
            except Leave:
                ended = Leave
            if ended is Leave:  # not where the exception is handled, which holds every frame of the training
                self._clear_away()
                self._member.leave(self._reason, current_job().iteration)
                continue
            self._member.done()
            if isinstance(ended, SystemExit):
                raise ended
            return ended

    def _enter(self) -> Any:
        """One wrapper: returns what ``pretrain`` returned, or the planned exit that it ended with."""
        now = _generation
        assert now is not None
        world = len(now.roster.ranks)
        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(now.rank), str(world)
        self._reason = ""
        monitors: list[psutil.Process] = []

        def body(call: Any) -> Any:
            now.call = call
            monitors.append(call.monitor_process.process_monitor_proc)
            store = dist.PrefixStore(f"generation/{now.roster.generation}/groups", connect(self._address))
            try:
                return self._pretrain(*self._args, store=store, **self._kwargs)
            except SystemExit as exit_:
                if exit_.code in (0, None):
                    return exit_  # a planned exit is no failure: the wrapper lets all ranks come to it
                raise
            except Exception as error:
                if not is_fault_of_others():
                    self._reason = f"rank {now.rank}: {type(error).__name__}: {_first_line(error)}"
                    traceback.print_exc()
                raise
            finally:
                now.call = None

        # The wrapper finds the argument by its type, which must not be a string.
        body.__annotations__ = {"call": inprocess.CallWrapper}
        ended = self._wrapper(now)(body)(None)
        with suppress(psutil.Error):  # it would take this process for dead if that ends before it has looked
            monitors[0].wait(timeout=5)
        return ended

    def _wrapper(self, now: Generation) -> inprocess.Wrapper:
        from megatron.training import get_args

        args = get_args()

        def aborting() -> None:
            now.aborting = True
            now.aborted_at = time.time()

        def seconds(flag: str) -> timedelta:
            return timedelta(seconds=getattr(args, f"inprocess_{flag}"))

        with _without("LOCAL_RANK") if is_cpu() else nullcontext():  # its checks of GPU, NVLink and NIC need them
            wrapper = inprocess.Wrapper(
                store_factory=GenerationStore,
                store_kwargs={"address": self._address, "generation": now.roster.generation},
                abort=AbortAll(self._address[1], aborting),
                health_check=None if is_cpu() else inprocess.health_check.CudaHealthCheck(timedelta(seconds=10)),
                finalize=_Leaving(lambda: wrapper.restart_health_check),
                rank_assignment=inprocess.rank_assignment.ActivateAllRanks(),
                heartbeat_interval=seconds("heartbeat_interval"),
                heartbeat_timeout=seconds("heartbeat_timeout"),
                barrier_timeout=seconds("barrier_timeout"),
                completion_timeout=seconds("completion_timeout"),
                monitor_process_interval=seconds("monitor_process_interval"),
                monitor_thread_interval=seconds("monitor_thread_interval"),
                progress_watchdog_interval=seconds("progress_watchdog_interval"),
                last_call_wait=seconds("last_call_wait"),
                soft_timeout=seconds("soft_timeout"),
                hard_timeout=seconds("hard_timeout"),
                termination_grace_time=seconds("termination_grace_time"),
            )
        return wrapper

    def _clear_away(self) -> None:
        """What the interruption may have left, on a rank that goes on."""
        torch.set_grad_enabled(True)
        if dist.is_initialized():  # it was being made when everything else was destroyed
            with suppress(Exception):
                dist.destroy_process_group()
        job = current_job()
        if job.sparse is not None:
            job.sparse.disconnect()
        megatron_state.forget_generation(job)
        if not job.begun:  # nothing that could be kept
            start_job()


class _Leaving(Finalize):
    """Leaves the wrapper where it would begin its next iteration."""

    def __init__(self, health_check: Callable[[], Any]) -> None:
        self._health_check = health_check

    def __call__(self, state: FrozenState) -> FrozenState:
        """Leave."""
        if (check := self._health_check()) is not None:
            check(state)
        raise Leave


@contextmanager
def _without(name: str) -> Iterator[None]:
    """Without an environment variable, for a while."""
    value = os.environ.pop(name, None)
    try:
        yield
    finally:
        if value is not None:
            os.environ[name] = value


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]
