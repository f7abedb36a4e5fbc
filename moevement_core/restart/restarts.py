"""Generations of a job in one process, which restarts training in place after every failure.

Each generation runs under a :class:`~moevement_core.restart.guard.Guard`. After a failure, all ranks leave the
generation and wait for the coordinator's next roster. So the number of processes is not fixed at the start, and the
death of a waiting spare interrupts no rank.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import socket
import sys
import threading
import time
import traceback
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from nvidia_resiliency_ext.inprocess.attribution import Interruption
from nvidia_resiliency_ext.shared_utils.log_manager import LogConfig

from moevement_core.comms import transport
from moevement_core.device import release_cached_memory
from moevement_core.errors import ConfigError, DataError, JobStopped, MoEvementError, ResultError, RunRecordError
from moevement_core.rendezvous.devices import identity, place_of
from moevement_core.rendezvous.drains import Departure
from moevement_core.rendezvous.interruption import GenerationStore, is_interrupted
from moevement_core.rendezvous.job_code import join_with_same_code
from moevement_core.rendezvous.member import Member
from moevement_core.rendezvous.roster import BLOCKS, ELASTIC, GROUPS, MemberInfo, Roster, UnusableDevice
from moevement_core.rendezvous.store import connect_to_groups
from moevement_core.rendezvous.value_client import connect, is_first_to_claim
from moevement_core.restart import injection
from moevement_core.restart.abort import AbortAll
from moevement_core.restart.connections import listening
from moevement_core.restart.device_health import DeviceFault, DeviceHealth, fault_of
from moevement_core.restart.faults import Phase
from moevement_core.restart.generation import (
    Generation,
    GenerationInterrupted,
    RankLeaves,
    Regroup,
    enter_generation,
    is_aborting,
    is_fault_of_others,
)
from moevement_core.restart.gloo import make_gloo_interruptible
from moevement_core.restart.groups import forget_groups
from moevement_core.restart.guard import PATIENCE, GenerationEnd, Guard
from moevement_core.restart.leaving import Leaving, LeavingPhase
from moevement_core.restart.training import Training
from moevement_core.util.environment import MEMBER_ENV, NODE_ENV
from moevement_core.util.exit_codes import BROKEN_DEVICE, DRAINED

DUMP_AFTER = 1 / 3
"""Part of the limit on hangs after which a rank that is still leaving its generation prints the stacks of its threads.

The limit on hangs is six lease times, so the rank prints the stacks after two lease times. If the rank has not left
after three lease times (twelve in jobs with devices), the job goes on without it.
"""
QUIET = 1 / 6
"""Part of the limit on hangs (one lease time) for which a rank leaves its generation without a report.

After this time, it reports each further phase of leaving to the coordinator.
"""
MOST_OF_A_REASON = 1000
"""Largest number of characters of an error in the report with which a rank leaves a generation."""
REPORT_S = 5.0
"""Longest time in seconds in which a process tries to report that it gives its rank back. After that, the process ends
without the report, and only the exit code tells the reason."""
MOST_OF_A_DEPARTURE = 2 / 3
"""Part of the limit on hangs (four lease times) for which a rank that has given its rank back waits for others.

The others need at most three lease times to hand over their state.
"""
DISTRUSTED = "distrusted/{}"
"""Key that the first process claims whose device has computed something wrong."""
ASK_S = 0.02
"""Seconds between two questions of such a rank whether the generation is interrupted."""


class Restarts:
    """Part of this process in all generations of a job, from its start to its end.

    Args:
        training: trainer of this process.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._values = connect()
        self._watching = connect()
        """Client for the threads that watch this rank, one after the other."""
        self._info = _introduction(training.watching.devices)
        self._member = Member(self._values, self._info, reads_all=training.grid is not None)
        self._health: DeviceHealth | None = None
        """Health of the device of this rank; None on CPUs, and for a spare."""
        self._reason = ""
        """Error of this rank in the current generation; empty if it has none."""
        self._suspects: tuple[int, ...] = ()
        """Ranks whose results in the current generation were not finite, as far as this rank knows."""

    def run(self) -> Any:
        """Take part in every generation until the end of the job; return the result of the training."""
        # nvidia-resiliency-ext logs every interruption at every level. The coordinator reports what users need.
        logging.getLogger(LogConfig.name).disabled = True
        make_gloo_interruptible()
        # Imported objects stay alive. The garbage collections of a recovery skip them from here on.
        gc.collect()
        gc.freeze()
        if (grid := self._training.grid) is not None:
            self._values.set(ELASTIC, grid.encode())
        if blocks := self._training.blocks:
            self._values.set(BLOCKS, ",".join(map(str, blocks)))
        join_with_same_code(self._values)
        self._member.join()
        while True:
            try:
                roster, rank = self._member.wait_for_rank(self._check_device)
                now = enter_generation(roster, rank)
                self._training.take_rank(rank, roster.world, roster.devices.get(rank))
                ended = self._enter(now)
            except JobStopped as stopped:
                sys.exit(str(stopped) or None)
            if ended is GenerationEnd.INTERRUPTED:
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
        """Clean up after an interruption, and report to the coordinator that this rank has left the generation."""
        now.leaving.begin(LeavingPhase.COLLECT)
        torch.set_grad_enabled(True)
        forget_groups()
        transport.admit()
        self._training.interrupted()
        now.free_bytes = release_cached_memory()
        now.leaving.end()
        had_recovered = self._training.resumed_in == now.roster.generation
        self._member.leave(self._reason, self._training.iteration, had_recovered=had_recovered, suspects=self._suspects)
        faulthandler.cancel_dump_traceback_later()

    def _check_device(self, roster: Roster, rank: int) -> None:
        """Give the rank back if its device cannot be used. Called before this process accepts ``roster``."""
        number = roster.devices.get(rank)
        if number is None or not self._info.devices:
            return
        if self._health is None or self._health.number != number:
            self._health = DeviceHealth(number, identity(self._info, number))
        if (fault := self._health.check()) is not None:
            self._give_back(fault)

    def _give_back_after(self, error: Exception, guard: Guard | None = None) -> None:
        """Give the rank back and end this process if ``error`` came from this process's device; otherwise return."""
        fault = fault_of(error) if self._health is None else self._health.fault_of(error)
        if fault is not None:
            traceback.print_exc()
            self._give_back(fault, guard)

    @property
    def _device(self) -> str:
        """Identity of this process's device, or name of its place on a CPU."""
        return self._health.identity if self._health is not None else place_of(self._info)

    def _give_back_distrusted(self, reason: str, guard: Guard, *, is_certain: bool) -> NoReturn:
        """Give the rank back because an audit has found wrong results; the second time, the device is not used again.

        A bit may flip once in a sound device, for example by radiation.
        """
        is_again = is_certain and not is_first_to_claim(DISTRUSTED.format(self._device))
        fault = DeviceFault(reason + (", for the second time" if is_again else ""), is_again)
        self._give_back(fault, guard, has_computed_wrong=True)

    def _give_back(
        self, fault: DeviceFault, guard: Guard | None = None, *, has_computed_wrong: bool = False
    ) -> NoReturn:  # fmt: skip
        """Report a fault of the device, interrupt the other ranks, and end this process.

        The process ends without destructors. They would use the device, or abort communicators with peers that do not
        yet know of the failure.
        """
        notice = UnusableDevice(fault.reason, self._device, fault.is_broken, has_computed_wrong)
        print(f"moevement: this process gives its rank back because of its device: {fault.reason}", file=sys.stderr)
        _end_after(REPORT_S, BROKEN_DEVICE)
        with guard.atomic() if guard is not None else nullcontext():  # An interruption must not stop the report.
            self._member.report_unusable_device(notice)
            if guard is not None:
                guard.interrupt_all(Interruption.EXCEPTION)
            _end_now(BROKEN_DEVICE)

    def _leave_for_good(self, text: str, now: Generation, guard: Guard) -> NoReturn:
        """Give the rank back, as the user asked, and end this process once the coordinator interrupts the generation.

        The end of a process interrupts all ranks. So this process stays while others of its node hand over their state.
        """
        _end_after(REPORT_S + self._training.watching.hang_s * MOST_OF_A_DEPARTURE, DRAINED)
        with guard.atomic():
            self._member.report_departure(Departure.GIVES_BACK, text)
            while not now.is_interrupted():
                time.sleep(ASK_S)
            _end_now(DRAINED)

    def _enter(self, now: Generation) -> Any:
        """Run one generation under a guard.

        Returns:
            The result of the training, a ``SystemExit`` if the script ended by a planned exit, or ``INTERRUPTED``.
        """
        watching = self._training.watching
        injection.begin(watching.faults, lambda: self._training.iteration)
        world = now.roster.world
        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(now.rank), str(world)
        self._reason, self._suspects = "", ()
        signals = GenerationStore(now.roster.generation, self._watching, connect)
        now.leaving = Leaving(watching.hang_s * QUIET, lambda phase: signals.report_leaving(self._member.number, phase))
        if (groups := connect_to_groups(self._values, now.roster.generation)) is None:
            return GenerationEnd.INTERRUPTED

        def begin_to_abort() -> None:
            now.abort()
            # If a thread waits where the abort cannot reach it, the job gives this process up. Print the place first.
            faulthandler.dump_traceback_later(watching.hang_s * DUMP_AFTER, exit=False)

        guard = Guard(
            rank=now.rank,
            world=world,
            store=signals,
            abort=AbortAll(
                store=groups.endpoints,
                groups=groups.connections,
                before=begin_to_abort,
                leaving=now.leaving,
                listeners=listening(),
            ),
            hang_s=watching.hang_s,
            interval_s=watching.interval_s,
            set_up_s=PATIENCE * watching.hang_s if watching.devices else None,
        )

        def body() -> Any:
            store = dist.PrefixStore(GROUPS.format(now.roster.generation), groups.store)
            try:
                if now.roster.generation > 0:
                    injection.at(Phase.GROUPS)
                ended = self._run(store)
                self._member.finished()
                with guard.waiting_for_others():
                    self._member.wait_for_end()
            except JobStopped as stopped:
                raise SystemExit(str(stopped)) from None
            except RankLeaves as leaves:
                self._leave_for_good(str(leaves), now, guard)
            except (Regroup, GenerationInterrupted):
                raise
            except ResultError as error:
                self._reason, self._suspects = f"rank {now.rank}: {_first_line(error)}", error.suspects
                raise
            except Exception as error:
                is_mistake = isinstance(error, ConfigError | DataError | RunRecordError)
                if is_mistake and self._has_not_trained(now) and not is_aborting():
                    raise _Unfit(error) from None  # Another attempt would fail in the same way.
                if not is_aborting():  # An abort causes errors too, so the next check of the device decides.
                    self._give_back_after(error, guard)
                if not is_fault_of_others():
                    self._reason = f"rank {now.rank}: {type(error).__name__}: {_first_line(error)}"
                    traceback.print_exc()
                raise
            return ended

        now.guard = guard
        now.is_interrupted = lambda: is_interrupted(self._values, now.roster.generation)
        now.report_departure = self._member.report_departure
        now.give_back = lambda reason, is_certain: self._give_back_distrusted(reason, guard, is_certain=is_certain)
        try:
            ended = guard.run(body)
            if ended is GenerationEnd.INTERRUPTED and guard.hang is not None:
                self._reason = f"rank {now.rank}: {guard.hang}"
            return ended
        except BaseException as end:
            # The end of this process breaks its process groups, which the other ranks see as an abort. So the
            # coordinator must know of the interruption first. If no rank has trained, each rank reports the mistake.
            is_first = now.roster.generation == 0
            if not (is_first and isinstance(end, _Unfit)) and (self._training.has_begun or not is_first):
                guard.interrupt_all(Interruption.BASE_EXCEPTION)
            if isinstance(end, _Unfit):
                raise end.error from None
            raise
        finally:
            now.guard = None

    def _has_not_trained(self, now: Generation) -> bool:
        """Return True if this rank has begun no training, or the job has not made its first update yet."""
        return not self._training.has_begun or (now.roster.generation == 0 and self._training.iteration == 0)

    def _run(self, store: Any) -> Any:
        try:
            return self._training.enter(store)
        except SystemExit as exit_:
            if exit_.code in (0, None):
                return exit_  # A planned exit is not a failure: all ranks reach it.
            if not self._training.has_begun:
                raise
            # Megatron's rerun machine ends a rank with code 16 or 17 if a result is NaN or cannot be reproduced. The
            # state of every rank is intact then, so this is an interruption like any other.
            raise TrainingExit(f"the trainer ended this rank with exit code {exit_.code}") from exit_


def _end_after(seconds: float, code: int) -> None:
    """End this process with ``code`` after ``seconds``, even if its main thread waits for the coordinator then."""
    timer = threading.Timer(seconds, os._exit, [code])
    timer.daemon = True
    timer.start()


def _end_now(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class TrainingExit(MoEvementError):
    """Error of a training script that ended its process with an exit code other than 0 while the job trained."""


class _Unfit(BaseException):
    """Wrapper of an error that would occur again in every attempt, such as a mistake in the flags; ends the process."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def _introduction(devices: tuple[str, ...]) -> MemberInfo:
    host = socket.gethostname()
    return MemberInfo(
        member=int(os.environ[MEMBER_ENV]),
        pid=os.getpid(),
        host=host,
        node=os.environ.get(NODE_ENV, host),
        device=int(os.environ.get("LOCAL_RANK", "0")),
        devices=devices,
    )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:MOST_OF_A_REASON]
