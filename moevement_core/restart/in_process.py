"""Training that is entered again after every failure, in the processes that are left and in a spare.

Each generation runs under a :class:`~moevement_core.restart.guard.Guard`. After a failure all ranks leave theirs
and wait for the next roster of the coordinator, so the number of processes is not fixed at the start, and a spare that
dies while it waits interrupts nobody.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import socket
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from nvidia_resiliency_ext.inprocess.attribution import Interruption
from nvidia_resiliency_ext.shared_utils.log_manager import LogConfig

from moevement_core.device import release_cached_memory
from moevement_core.errors import ConfigError, DataError, JobStopped, MoEvementError, ResultError, RunRecordError
from moevement_core.exit_codes import BROKEN_DEVICE
from moevement_core.injection import Fault, Phase
from moevement_core.rendezvous.devices import identity
from moevement_core.rendezvous.job_code import join_with_same_code
from moevement_core.rendezvous.member import Member
from moevement_core.rendezvous.resizing import Grid
from moevement_core.rendezvous.roster import BLOCKS, ELASTIC, GivenBack, MemberInfo, Roster
from moevement_core.restart import injection
from moevement_core.restart.abort import AbortAll
from moevement_core.restart.connections import listening
from moevement_core.restart.device_health import DeviceFault, DeviceHealth, fault_of
from moevement_core.restart.environment import MEMBER_ENV, NODE_ENV
from moevement_core.restart.generation import (
    Generation,
    GenerationInterrupted,
    Regroup,
    enter_generation,
    is_aborting,
    is_fault_of_others,
)
from moevement_core.restart.gloo import make_gloo_interruptible
from moevement_core.restart.groups import forget_groups
from moevement_core.restart.guard import PATIENCE, Guard, Outcome
from moevement_core.restart.leaving import Leaving, LeavingPhase
from moevement_core.restart.store import GenerationStore, connect, connect_breakable, endpoints, store_address

DUMP_AFTER = 1 / 3
"""Share of the hang limit after which a rank that does not stop prints the stacks of its threads: two lease times of
the three after which the job continues without it.
"""
QUIET = 1 / 6
"""Share of the hang limit after which the coordinator hears of each further phase of leaving: a lease time."""
REPORT_S = 5.0
"""Seconds that a process may take to give its rank back; then it ends without a report, by its exit code."""


@dataclass(frozen=True)
class Watching:
    """Settings of the watch over a training rank."""

    hang_s: float
    """Seconds for which the main thread may run no Python code before it counts as hanging."""
    interval_s: float = 0.5
    """Seconds between two checks of the monitoring thread."""
    faults: Sequence[Fault] = ()
    """Faults that are injected."""
    devices: tuple[str, ...] = ()
    """Identities of the accelerators that this process sees (:func:`~moevement_core.device.visible_devices`)."""


class Training(ABC):
    """Training that is entered again and again in one process; every method is called on its main thread."""

    @property
    @abstractmethod
    def watching(self) -> Watching:
        """Settings of the watch over this rank."""

    @abstractmethod
    def enter(self, store: Any) -> Any:
        """Train to the end, in the process groups that are made here.

        Called once in each generation, when ``RANK`` and ``WORLD_SIZE`` in the environment are those of this
        generation. Whatever it raises is a failure, and leads to the next generation.

        Args:
            store: for ``torch.distributed.init_process_group``; its keys are those of this generation.
        """

    @property
    def grid(self) -> Grid | None:
        """Sizes to which an elastic job may change; None for a job that keeps its size."""
        return None

    @property
    def blocks(self) -> tuple[int, ...]:
        """Numbers of consecutive ranks that communicate in every layer, and so should be on one node; each above 1."""
        return ()

    def take_rank(self, rank: int, world: int, device: int | None) -> None:
        """Be ``rank`` from now on; called before :meth:`enter`, outside of the guard.

        Args:
            rank: of the job.
            world: how many ranks the job has.
            device: the local number of its device; None: it is known already.
        """

    @abstractmethod
    def interrupted(self) -> None:
        """Put away what the interruption has left half done; called between two generations, with all groups gone."""

    def ended(self) -> None:
        """Called once, when the job has come to its end."""

    @property
    @abstractmethod
    def has_begun(self) -> bool:
        """Return whether training has begun, so that there is state to keep through a failure."""

    @property
    @abstractmethod
    def iteration(self) -> int:
        """The last committed iteration."""

    @property
    @abstractmethod
    def resumed_in(self) -> int:
        """The newest generation in which training went on, with every failure before behind it; -1 before the first."""


def is_restarted_in_process() -> bool:
    """Return whether this process takes part in a job that continues after failures."""
    return MEMBER_ENV in os.environ


def run_through_failures(training: Training) -> Any:
    """Run ``training`` to the end of the job, through as many failures as come; returns what it returned.

    Raises:
        SystemExit: the job ends, as planned or because it cannot go on.
    """
    global _was_entered
    _was_entered = True
    return _Restarts(training).run()


_was_entered = False


def was_entered() -> bool:
    """Return whether training of this process has taken part in its job."""
    return _was_entered


class _Restarts:
    def __init__(self, training: Training) -> None:
        address = store_address()
        assert address is not None
        self._training = training
        self._address = address
        self._store = connect(address)
        self._endpoints = endpoints(address)
        self._info = _introduction(training.watching.devices)
        self._member = Member(self._store, self._info)
        self._health: DeviceHealth | None = None
        """Health of the device that came with the rank; None on CPUs, and for a spare."""
        self._reason = ""
        self._suspects: tuple[int, ...] = ()

    def run(self) -> Any:
        """Run to the end of the job."""
        # It logs every interruption at every level; what an operator should know the coordinator reports.
        logging.getLogger(LogConfig.name).disabled = True
        make_gloo_interruptible()
        # What was imported stays. Garbage collections, of which a recovery makes some, pass it over from here on.
        gc.collect()
        gc.freeze()
        if (grid := self._training.grid) is not None:
            self._store.set(ELASTIC, grid.encode())
        if blocks := self._training.blocks:
            self._store.set(BLOCKS, ",".join(map(str, blocks)))
        join_with_same_code(self._store)
        self._member.join()
        while True:
            try:
                roster, rank = self._member.wait_for_rank(self._check_device)
                now = enter_generation(roster, rank)
                self._training.take_rank(rank, len(roster.ranks), roster.devices.get(rank))
                ended = self._enter(now)
            except JobStopped as stopped:
                sys.exit(str(stopped) or None)
            if ended is Outcome.INTERRUPTED:
                try:
                    self._leave(now)
                except Exception as error:
                    self._give_back_after(error)
                    raise
                continue
            self._training.ended()
            if isinstance(ended, SystemExit):
                raise ended
            return ended

    def _leave(self, now: Generation) -> None:
        """Put away what an interruption has left, and have the job formed again."""
        now.leaving.begin(LeavingPhase.COLLECT)
        torch.set_grad_enabled(True)
        forget_groups()
        self._training.interrupted()
        now.free_bytes = release_cached_memory()
        now.leaving.end()
        had_recovered = self._training.resumed_in == now.roster.generation
        self._member.leave(self._reason, self._training.iteration, had_recovered=had_recovered, suspects=self._suspects)
        faulthandler.cancel_dump_traceback_later()

    def _check_device(self, roster: Roster, rank: int) -> None:
        """Give the rank back if the device that comes with it cannot be used."""
        number = roster.devices.get(rank)
        if number is None or not self._info.devices:
            return
        if self._health is None or self._health.number != number:
            self._health = DeviceHealth(number, identity(self._info, number))
        if (fault := self._health.check()) is not None:
            self._give_back(fault)

    def _give_back_after(self, error: Exception, guard: Guard | None = None) -> None:
        """Give the rank back if an exception came from this process's device; return if it did not."""
        fault = fault_of(error) if self._health is None else self._health.fault_of(error)
        if fault is not None:
            traceback.print_exc()
            self._give_back(fault, guard)

    def _give_back(self, fault: DeviceFault, guard: Guard | None = None) -> NoReturn:
        """Report a fault of the device, interrupt the others, and end: nothing can be done in this process any more.

        Without destructors, which would ask the device, or abort communicators with peers that do not know yet.
        """
        unheard = threading.Timer(REPORT_S, os._exit, [BROKEN_DEVICE])
        unheard.daemon = True
        unheard.start()
        device = self._health.identity if self._health is not None else ""
        with guard.atomic() if guard is not None else nullcontext():  # no interruption has it go on
            print(f"moevement: this process gives its rank back: {fault.reason}", file=sys.stderr)
            self._member.give_back(GivenBack(fault.reason, device, fault.is_broken))
            if guard is not None:
                guard.interrupt_all(Interruption.EXCEPTION)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(BROKEN_DEVICE)

    def _enter(self, now: Generation) -> Any:
        """Run one generation. Return the result of training, the planned exit that it ended with,
        or ``INTERRUPTED``.
        """
        watching = self._training.watching
        injection.begin(watching.faults, lambda: self._training.iteration)
        world = len(now.roster.ranks)
        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(now.rank), str(world)
        self._reason, self._suspects = "", ()
        groups_store, its_connections = connect_breakable(self._address)

        signals = GenerationStore(connect(self._address), now.roster.generation)
        now.leaving = Leaving(watching.hang_s * QUIET, lambda phase: signals.report_leaving(self._member.number, phase))

        def begin_to_abort() -> None:
            now.abort()
            # A thread that waits where no abort frees it does not stop, and its process is given up. It says where.
            faulthandler.dump_traceback_later(watching.hang_s * DUMP_AFTER, exit=False)

        guard = Guard(
            now.rank,
            world,
            signals,
            AbortAll(self._endpoints, its_connections, begin_to_abort, now.leaving, listening()),
            watching.hang_s,
            watching.interval_s,
            PATIENCE * watching.hang_s if watching.devices else None,
        )

        def body() -> Any:
            store = dist.PrefixStore(f"generation/{now.roster.generation}/groups", groups_store)
            try:
                if now.roster.generation > 0:
                    injection.at(Phase.GROUPS)
                ended = self._run(store)
                self._member.finished()
                with guard.waiting_for_others():
                    self._member.wait_for_end()
            except JobStopped as stopped:
                raise SystemExit(str(stopped)) from None
            except (ConfigError, DataError, RunRecordError) as error:
                if self._training.has_begun or is_aborting():
                    raise
                raise _Unfit(error) from None  # it would be the same again
            except (Regroup, GenerationInterrupted):
                raise
            except ResultError as error:
                self._reason, self._suspects = f"rank {now.rank}: {_first_line(error)}", error.suspects
                raise
            except Exception as error:
                if not is_aborting():  # an abort's own errors are looked at when the device is checked again
                    self._give_back_after(error, guard)
                if not is_fault_of_others():
                    self._reason = f"rank {now.rank}: {type(error).__name__}: {_first_line(error)}"
                    traceback.print_exc()
                raise
            return ended

        now.guard = guard
        now.is_interrupted = GenerationStore(self._store, now.roster.generation).is_interrupted
        try:
            ended = guard.run(body)
            if ended is Outcome.INTERRUPTED and guard.hang is not None:
                self._reason = f"rank {now.rank}: {guard.hang}"
            return ended
        except BaseException as end:
            # The process ends, and its process groups with it: to other ranks that is an abort, which has to stand in
            # the store before it comes. Where nobody has trained, each rank is to report its mistake itself.
            if self._training.has_begun or now.roster.generation > 0:
                guard.interrupt_all(Interruption.BASE_EXCEPTION)
            if isinstance(end, _Unfit):
                raise end.error from None
            raise
        finally:
            now.guard = None

    def _run(self, store: Any) -> Any:
        try:
            return self._training.enter(store)
        except SystemExit as exit_:
            if exit_.code in (0, None):
                return exit_  # a planned exit is no failure: all ranks come to it
            if not self._training.has_begun:
                raise
            # Megatron's rerun machine ends a rank with 16 or 17 where a result was not a number, or did not come again.
            # The state of every rank is whole then, so it is an interruption like any other.
            raise TrainingExit(f"the trainer ended this rank with exit code {exit_.code}") from exit_


class TrainingExit(MoEvementError):
    """The training script ended its process with another code than 0 while the job trained."""


class _Unfit(BaseException):
    """A mistake of the user's, which another attempt would meet again."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def _introduction(devices: tuple[str, ...]) -> MemberInfo:
    host = socket.gethostname()
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
