"""Guard of one generation's training on this rank: interrupts it when any rank fails, and when this one hangs.

What notices, aborts and interrupts is nvidia-resiliency-ext's: its monitoring thread, its watchdog of the main thread.
Its ``Wrapper`` around them is not used. It has ranks meet in barriers of the generation that has just failed, which a
rank that is lost never enters, and one whose monitor cannot be reached ends though its memory is whole. Here whatever
happens but a result means that the generation is left, and who takes part in the next one the coordinator decides.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any

from nvidia_resiliency_ext.inprocess.abort import Abort
from nvidia_resiliency_ext.inprocess.attribution import Interruption, InterruptionRecord
from nvidia_resiliency_ext.inprocess.exception import TimeoutError as MonitorTimeout
from nvidia_resiliency_ext.inprocess.monitor_thread import MonitorThread, RankShouldRestart, reraise_if_unraisable
from nvidia_resiliency_ext.inprocess.progress_watchdog import ProgressWatchdog, Timestamp
from nvidia_resiliency_ext.inprocess.state import Mode, State

LOOK_S = 0.25
"""Seconds between two checks of the main thread's progress."""
PATIENCE = 10
"""Factor by which a rank that waits for working ranks may seem to hang for longer."""


class Outcome(Enum):
    """Outcomes of a guarded generation that did not come to its result."""

    INTERRUPTED = "interrupted"


class Guard:
    """Guard for one generation of one rank; the main thread makes it and calls :meth:`run` once.

    Args:
        rank: this one.
        world: ranks of the job.
        store: of this generation; an ``nvidia_resiliency_ext`` ``StoreMixin``.
        abort: ends every communication of this process; called on the monitoring thread.
        hang_s: for how long the main thread may run no Python code before it is taken to hang.
        interval_s: how often the monitoring thread looks.
        set_up_s: the same as ``hang_s`` before :meth:`expect_progress`; None: no other one. Devices and their libraries
            are set up in single long calls.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        store: Any,
        abort: Abort,
        hang_s: float,
        interval_s: float,
        set_up_s: float | None = None,
    ) -> None:
        self._rank, self._store, self._hang_s = rank, store, hang_s
        self._usual_s = hang_s if set_up_s is None else set_up_s
        """The limit where no context sets another one."""
        self._limited_s: float | None = None
        """The limit of the innermost context."""
        self._main_thread = threading.get_ident()
        self.hang: str | None = None
        """Place and length of this rank's hang, in words; None while it did not hang."""
        self._seen = Timestamp(auto=time.monotonic())
        self._has_ended = False
        """True once the generation has ended. No event: an exception from outside could leave the lock of one behind
        (:mod:`moevement_core.gate`).
        """
        self._atomic = threading.RLock()
        self._watchdog = ProgressWatchdog(rank, self, timedelta(seconds=min(1.0, hang_s / 4)))
        state = State(rank, world, active_rank=rank, active_world_size=world, mode=Mode.ACTIVE)
        self._monitor = MonitorThread(
            state=state.freeze(),
            store=store,
            abort=abort,
            interval=timedelta(seconds=interval_s),
            progress_watchdog=self._watchdog,
            soft_timeout=timedelta(seconds=hang_s),
            last_call_wait=timedelta(0),
            atomic_lock=self._atomic,
            daemon=True,
        )

    def send_timestamp(self, timestamp: Timestamp) -> None:
        """Note when the main thread last ran Python code; called by the watchdog."""
        if timestamp.auto > self._seen.auto:
            self._seen = timestamp

    @contextmanager
    def atomic(self) -> Iterator[None]:
        """A section that no restart interrupts, and that must not wait for any other process."""
        while not self._atomic.acquire(blocking=False):  # an exception can interrupt this, and not a wait for a lock
            pass
        try:
            yield
        finally:
            self._atomic.release()

    def expect_progress(self) -> None:
        """End the time of ``set_up_s``."""
        self._usual_s = self._hang_s

    def waiting_for_others(self) -> AbstractContextManager[None]:
        """This rank waits for others that are at work; who hangs there is noticed there, and first."""
        return self._limit(max(PATIENCE * self._hang_s, self._usual_s))

    def working(self) -> AbstractContextManager[None]:
        """Mark, within :meth:`waiting_for_others`, that this rank is one of those that work."""
        return self._limit(self._usual_s)

    def connecting(self) -> AbstractContextManager[None]:
        """Ranks make communicators with each other: each of these calls is short, in the time of ``set_up_s``, too."""
        return self._limit(self._hang_s)

    @contextmanager
    def _limit(self, seconds: float) -> Iterator[None]:
        before = self._limited_s
        self._set_limit(seconds)
        try:
            yield
        finally:
            self._set_limit(before)

    def _set_limit(self, seconds: float | None) -> None:
        self._seen = Timestamp(auto=time.monotonic())
        self._limited_s = seconds

    @property
    def limit_s(self) -> float:
        """Seconds without progress of the main thread that are taken for a hang now."""
        return self._usual_s if self._limited_s is None else self._limited_s

    def run(self, body: Callable[[], Any]) -> Any:
        """Run ``body``: returns what it returned, or :attr:`Outcome.INTERRUPTED`.

        Raises:
            BaseException: what ``body`` raised, if it is no ``Exception``: then the process is to end.
        """
        outcome: Any = Outcome.INTERRUPTED
        with reraise_if_unraisable(RankShouldRestart):
            try:
                try:
                    self._watchdog.start()
                    self._monitor.start()
                    threading.Thread(target=self._watch_for_hang, name="moevement-hang", daemon=True).start()
                    outcome = body()
                except Exception:  # whoever raised it has reported it
                    self.interrupt_all(Interruption.EXCEPTION)
                    self._watchdog.spin_till_paused()  # the monitoring thread interrupts this one now, too
                    self._monitor.maybe_join()
            except RankShouldRestart:
                outcome = Outcome.INTERRUPTED
            finally:
                self._end()
        return outcome

    def interrupt_all(self, why: Interruption) -> None:
        """Interrupt every rank of this generation."""
        self._store.record_interrupted([InterruptionRecord(self._rank, why)])

    def _watch_for_hang(self) -> None:
        while True:
            time.sleep(LOOK_S)
            if self._has_ended:
                return
            limit_s = self.limit_s
            if self._seen.is_timed_out(timedelta(seconds=limit_s)):
                self.hang = f"no progress for {limit_s:g} s in {self._place()}"
                self.interrupt_all(Interruption.SOFT_TIMEOUT)
                return

    def _place(self) -> str:
        frame = sys._current_frames()[self._main_thread]
        return f"{frame.f_code.co_qualname} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"

    def _end(self) -> None:
        """End both threads, whatever interrupts the main thread meanwhile; after it nothing does."""
        self._has_ended = True
        while True:
            try:
                self._end_threads()
                return
            except (RankShouldRestart, MonitorTimeout):
                # Interrupted once more; or the abort takes long, and nothing can go on before it is over.
                continue

    def _end_threads(self) -> None:
        if self._monitor.ident is not None and self._monitor.is_alive():
            self._monitor.shutdown()
        if self._watchdog.is_alive():
            # Not its own shutdown, in which the main thread would wait for calls that it has to make itself.
            self._watchdog.pause_requested.set()
            self._watchdog.interval_event.set()
            self._watchdog.spin_till_paused()
            self._watchdog.should_stop.set()
            self._watchdog.join()
