"""Guard of one generation's training on this rank: interrupts it when any rank fails or when this rank hangs.

The monitoring thread and the watchdog of the main thread are those of nvidia-resiliency-ext. They notice failures,
abort communication and interrupt the main thread.

This project does not use the library's ``Wrapper`` around them. The wrapper makes ranks meet in barriers of the failed
generation, which a failed rank never enters. It also ends a rank whose monitor cannot be reached, although the memory
of that rank is intact. Under the guard, a rank that fails or is interrupted only leaves the generation. The coordinator
then decides which processes take part in the next generation.
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
"""Seconds between two checks that the main thread makes progress."""
PATIENCE = 10
"""Factor by which the limit on hangs is longer while a rank waits for ranks that work."""


class GenerationEnd(Enum):
    """Value that :meth:`Guard.run` returns if the generation ended without a result."""

    INTERRUPTED = "interrupted"


class Guard:
    """Guard of one generation of one rank. The main thread makes it and calls :meth:`run` once.

    Args:
        rank: this rank.
        world: number of ranks of the job.
        store: store of this generation, a ``StoreMixin`` of ``nvidia_resiliency_ext``.
        abort: ends every communication of this process; called on the monitoring thread.
        hang_s: seconds without Python code in the main thread after which the rank counts as hung.
        interval_s: seconds between two checks of the monitoring thread.
        set_up_s: limit in seconds that replaces ``hang_s`` until :meth:`expect_progress` is called. It is longer,
            because single calls that set up devices and their libraries take long. None: ``hang_s``.
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
        """Limit on hangs, in seconds, where no context sets another limit (:meth:`waiting_for_others` sets one)."""
        self._limited_s: float | None = None
        """Limit on hangs of the innermost context, in seconds; None outside of all contexts."""
        self._main_thread = threading.get_ident()
        self.hang: str | None = None
        """Description of this rank's hang: the limit and the place in the code; None if it has not hung."""
        self._seen = Timestamp(auto=time.monotonic())
        """Monotonic time at which the main thread was last known to run Python code."""
        self._has_ended = False
        """True if the guarded call has ended.

        This is not a ``threading.Event``, because an interruption could leave its lock held
        (:mod:`moevement_core.util.gate`).
        """
        self._atomic = threading.RLock()
        """Lock that the main thread holds in sections without interruptions."""
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
        """Take the time at which the main thread last ran Python code; the watchdog calls this."""
        if timestamp.auto > self._seen.auto:
            self._seen = timestamp

    @contextmanager
    def atomic(self) -> Iterator[None]:
        """Hold off interruptions in a ``with`` block, which must not wait for any other process."""
        while not self._atomic.acquire(blocking=False):  # An interruption can end this loop, but not a blocking call.
            pass
        try:
            yield
        finally:
            self._atomic.release()

    def expect_progress(self) -> None:
        """Switch from the limit ``set_up_s`` to ``hang_s``; called when the rank has committed an iteration."""
        self._usual_s = self._hang_s

    def waiting_for_others(self) -> AbstractContextManager[None]:
        """Return a context in which this rank waits for ranks that work, with a limit of :data:`PATIENCE` x ``hang_s``.

        If a rank that works hangs, the guard of that rank notices the hang first.
        """
        return self._limit(max(PATIENCE * self._hang_s, self._usual_s))

    def working(self) -> AbstractContextManager[None]:
        """Return a context with the usual limit, for work of this rank inside :meth:`waiting_for_others`."""
        return self._limit(self._usual_s)

    def connecting(self) -> AbstractContextManager[None]:
        """Return a context in which ranks make communicators, with the limit ``hang_s`` even before a commit.

        Each call that makes a communicator is short.
        """
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
        """Current limit: seconds without progress of the main thread after which this rank counts as hung."""
        return self._usual_s if self._limited_s is None else self._limited_s

    def run(self, body: Callable[[], Any]) -> Any:
        """Run ``body`` under guard.

        Returns:
            The result of ``body``, or :attr:`GenerationEnd.INTERRUPTED` if it raised an ``Exception`` or was
            interrupted.

        Raises:
            BaseException: ``body`` raised one that is not an ``Exception``. The caller then ends the process.
        """
        outcome: Any = GenerationEnd.INTERRUPTED
        with reraise_if_unraisable(RankShouldRestart):
            try:
                try:
                    self._watchdog.start()
                    self._monitor.start()
                    threading.Thread(target=self._watch_for_hang, name="moevement-hang", daemon=True).start()
                    outcome = body()
                except Exception:  # The body has reported the error.
                    self.interrupt_all(Interruption.EXCEPTION)
                    self._watchdog.spin_till_paused()  # The monitoring thread now interrupts this thread as well.
                    self._monitor.maybe_join()
            except RankShouldRestart:
                outcome = GenerationEnd.INTERRUPTED
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
                self.hang = f"the main thread made no progress for {limit_s:g} s in {self._place()}"
                self.interrupt_all(Interruption.SOFT_TIMEOUT)
                return

    def _place(self) -> str:
        frame = sys._current_frames()[self._main_thread]
        return f"{frame.f_code.co_qualname} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"

    def _end(self) -> None:
        """End the monitoring thread and the watchdog; no interruption reaches the main thread after this."""
        self._has_ended = True
        while True:
            try:
                self._end_threads()
                return
            except (RankShouldRestart, MonitorTimeout):
                # Either one more interruption has come, or the abort takes long. This rank waits until the abort ends.
                continue

    def _end_threads(self) -> None:
        if self._monitor.ident is not None and self._monitor.is_alive():
            self._monitor.shutdown()
        if self._watchdog.is_alive():
            # In the watchdog's own shutdown, the main thread would wait for calls that it has to make itself.
            self._watchdog.pause_requested.set()
            self._watchdog.interval_event.set()
            self._watchdog.spin_till_paused()
            self._watchdog.should_stop.set()
            self._watchdog.join()
