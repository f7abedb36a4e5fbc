"""Meter of what saving costs one rank's training, iteration by iteration."""

from __future__ import annotations

from moevement_core.overhead.cap import Evidence
from moevement_core.overhead.estimate import Overhead, OverheadEstimate, Timed
from moevement_core.overhead.pause import Pause
from moevement_core.overhead.quiet import is_quiet

PAUSE_LIMIT = 3.0
"""A pause ends after so many times the length of an iteration; the iteration is not counted as quiet then."""
SETTLING = 2
"""Iterations of a job that do not count: the first one captures a whole window, and both compile and allocate."""
FIRST_LIMIT_S = 60.0
"""Seconds after which a pause ends while no length is known."""


class OverheadMeter:
    """Clock of one rank: the training thread tells it when an iteration begins and ends.

    Args:
        began_at: the iteration whose state the job began from, the same on all ranks.
        pause: of this rank's background work; begun and ended here.
    """

    def __init__(self, began_at: int, pause: Pause) -> None:
        self._began_at, self._pause = began_at, pause
        self._estimate = OverheadEstimate()
        self.is_measuring = True
        """True if there are quiet iterations; a benchmark that turns saving off and on itself has none."""
        self._iteration = -1
        self._copy_s = self._policy_s = self._stall_s = 0.0
        self._is_quiet = False

    def begin(self, iteration: int, begin_s: float, policy_s: float, stall_s: float = 0.0) -> None:
        """Begin ``iteration``, for which the training thread has captured a snapshot.

        Args:
            iteration: the iteration that begins.
            begin_s: seconds of the training thread for snapshot and policy.
            policy_s: those of them for order and window.
            stall_s: those of them that were waits for copies.
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
        """End ``iteration``; does nothing for one that was not begun here.

        Args:
            iteration: the iteration that ends.
            step_s: seconds that it took, after :meth:`begin`.
            stall_s: seconds of them in which training waited for copies.
            digest_cpu_s: processor seconds for digests since the iteration before.
            send_cpu_s: processor seconds for sending and receiving copies since the iteration before.
            is_saving: whether a snapshot was copied, digested, sent or written beside it, or waited for that.
        """
        has_lasted = self._pause.end()
        if iteration != self._iteration or (self._is_quiet and not has_lasted):
            return
        if iteration <= self._began_at + SETTLING:
            return
        self._estimate.add(
            Timed(
                iteration, step_s - stall_s, self._copy_s, self._policy_s, self._stall_s + stall_s, digest_cpu_s,
                send_cpu_s, self._is_quiet or not is_saving,
            )
        )  # fmt: skip

    def interrupted(self) -> None:
        """End a pause that an exception has interrupted; the iteration does not count."""
        self._pause.end()
        self._iteration = -1

    @property
    def quiet_s(self) -> float | None:
        """Seconds that an iteration takes without saving, median; None before the first comparison."""
        return self._estimate.quiet_s

    def evidence(self) -> Evidence:
        """Return what is known of the cost of what is saved now."""
        return self._estimate.evidence()

    def forget(self) -> None:
        """Begin again: what is saved from now on is something else."""
        self._estimate.forget()

    def measured(self) -> Overhead | None:
        """Return what saving costs; None before a quiet iteration could be compared with its neighbours."""
        return self._estimate.measured()
