"""Meter of the cost of saving on one rank. It times iterations, and pauses background work in quiet ones."""

from __future__ import annotations

from moevement_core.overhead.cap import Evidence
from moevement_core.overhead.estimate import Overhead, OverheadEstimate, Timed
from moevement_core.overhead.pause import Pause
from moevement_core.overhead.quiet import is_quiet

PAUSE_LIMIT = 3.0
"""Time after which a pause of sends ends, even within an iteration, as a multiple of the iteration time.

The estimate leaves out an iteration in which a pause ended early.
"""
SETTLING = 2
"""Number of iterations that the estimate leaves out when a job starts, and after a failure.

A new process compiles code and allocates memory in them, and all other ranks wait for it. The first iteration of a job
also captures a whole window.
"""
FIRST_LIMIT_S = 60.0
"""Seconds after which a pause ends while the length of an iteration is unknown."""


class OverheadMeter:
    """Clock of one rank's iterations; the training thread starts and stops it.

    Args:
        began_at: iteration whose state the job began from, the same on all ranks.
        pause: pause of this rank's background work; the meter begins and ends it.
    """

    def __init__(self, began_at: int, pause: Pause) -> None:
        self._began_at, self._pause = began_at, pause
        self._estimate = OverheadEstimate()
        self.is_measuring = True
        """True if background work pauses in some iterations; False if a benchmark switches saving on and off."""
        self._iteration = -1
        self._settling, self._is_changed = SETTLING, False
        self._copy_s = self._policy_s = self._stall_s = 0.0
        self._is_quiet = False

    def begin(self, iteration: int, begin_s: float, policy_s: float, stall_s: float = 0.0) -> None:
        """Begin ``iteration``, after the training thread has begun to capture a snapshot.

        Args:
            iteration: iteration that begins.
            begin_s: seconds that the training thread spent on the snapshot and the policy.
            policy_s: part of ``begin_s`` for the decision about order and window.
            stall_s: part of ``begin_s`` in which the thread waited for copies.
        """
        self._iteration, self._policy_s, self._stall_s = iteration, policy_s, stall_s
        self._copy_s = max(0.0, begin_s - policy_s - stall_s)
        self._is_quiet = self.is_measuring and is_quiet(iteration, self._began_at)
        if self._is_quiet:
            quiet_s = self._estimate.quiet_s
            limit_s = FIRST_LIMIT_S if quiet_s is None else max(1.0, PAUSE_LIMIT * quiet_s)
            self._pause.begin(limit_s, quiet_s or 0.0)

    def end(
        self, iteration: int, step_s: float, stall_s: float, digest_cpu_s: float, send_cpu_s: float, *,
        is_saving: bool = True,
    ) -> None:  # fmt: skip
        """End ``iteration``; the call is ignored if :meth:`begin` was not called for this iteration.

        Args:
            iteration: iteration that ends.
            step_s: seconds since :meth:`begin`.
            stall_s: part of ``step_s`` in which training waited for copies.
            digest_cpu_s: processor seconds for digests since the previous iteration.
            send_cpu_s: processor seconds for sending and receiving copies since the previous iteration.
            is_saving: True if, during the iteration, a snapshot was copied, digested, sent or written, or waited for
                such work.
        """
        has_lasted = self._pause.end()
        if iteration != self._iteration:
            return
        is_left_out = self.is_settling or self._is_changed or (self._is_quiet and not has_lasted)
        self._settling, self._is_changed = max(0, self._settling - 1), False
        if is_left_out:
            return
        self._estimate.add(
            Timed(
                iteration, train_s=step_s - stall_s, copy_s=self._copy_s, policy_s=self._policy_s,
                stall_s=self._stall_s + stall_s, digest_cpu_s=digest_cpu_s, send_cpu_s=send_cpu_s,
                is_quiet=self._is_quiet or not is_saving,
            )
        )  # fmt: skip

    def interrupted(self) -> None:
        """End the pause of background work, and leave out the iteration that an exception has just interrupted.

        The estimate also leaves out the first iterations after the recovery.
        """
        self._pause.end()
        self._iteration, self._settling = -1, SETTLING

    @property
    def is_settling(self) -> bool:
        """True if the current iteration is one of the first after the start of the job, or after a failure."""
        return self._settling > 0

    @property
    def quiet_s(self) -> float | None:
        """Median seconds of an iteration without saving; None before the first comparison."""
        return self._estimate.quiet_s

    def evidence(self) -> Evidence:
        """Return the cost of saving, measured since the last call of :meth:`forget`."""
        return self._estimate.evidence()

    def forget(self) -> None:
        """Discard the measured cost, because the windows have changed; called before the iteration begins.

        The estimate leaves out this iteration, in which ranks decide on the windows and allocate memory for them.
        """
        self._is_changed = True
        self._estimate.forget()

    def measured(self) -> Overhead | None:
        """Return the cost of saving; None before the first comparison of a quiet iteration with its neighbours."""
        return self._estimate.measured()
