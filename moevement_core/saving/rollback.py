"""Roll back of a job after its loss has spiked: where it restarts, and which iterations it leaves out from then on.

The coordinator holds the decision, so every process of the job knows it, even one that joins later. A job rolls back at
most once. The rank that finds the spike decides that the job rolls back. The restart, at which no window disappears any
more, chooses the window. PaLM was trained in this way by hand (arXiv 2204.02311, section 5.1).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict, dataclass, replace

from moevement_core.rendezvous.value_client import connect, supervisor_address
from moevement_core.storage.config import FEWEST_BACK

_KEY, _TARGET = "job/rollback", "job/rollback_target"
_NO_TARGET = "none"


@dataclass(frozen=True, slots=True)
class RollbackDecision:
    """Decision to roll back."""

    spiked: int
    """Iteration in which the loss spiked."""
    by: int
    """Smallest number of iterations before the spike whose state the job goes back to, if a window restores it."""
    start: str
    """Name of the job's start in which the loss spiked; windows on disk carry it (:attr:`JobNames.start`)."""
    reason: str
    """Text for the log."""
    restores: int | None = None
    """Iteration that the job has gone back to; None before the restart, or if no window is old enough."""

    @property
    def left_out(self) -> range:
        """Iterations that the job does not execute any more."""
        return range(0) if self.restores is None else range(self.restores + 1, self.spiked + 1)

    @property
    def bad_checkpoints(self) -> range:
        """Iterations whose dense checkpoints are too close to the spike. An earlier one may be newer than a window."""
        return range(self.spiked - self.by + 1, self.spiked + 1)

    def choose(self, restorable: Iterable[int]) -> int | None:
        """Return the iteration to go back to; None if no window restores one before the spike.

        The loss of iteration t is that of the state of t - 1, so the state of ``spiked - 1`` may be the bad one.

        Args:
            restorable: iterations that the windows on disk restore.
        """
        earlier = [iteration for iteration in restorable if iteration <= self.spiked - FEWEST_BACK]
        far_enough = [iteration for iteration in earlier if iteration <= self.spiked - self.by]
        return max(far_enough) if far_enough else min(earlier, default=None)

    def is_undone(self, written_by: str, reaches: int) -> bool:
        """Return True if a window belongs to the iterations that the job has gone back from.

        Args:
            written_by: name of the job's start that wrote the window.
            reaches: iteration that the window restores.
        """
        return self.restores is not None and reaches > self.restores and self.is_earlier(written_by)

    def is_earlier(self, start: str) -> bool:
        """Return True if a start of the job, given by name, is not later than the one in which the loss spiked."""
        return _number(start) <= _number(self.start)


def decide_once(decision: RollbackDecision) -> bool:
    """Decide on a roll back of the job; return False if the job has decided on one before.

    The rank that has found the spike calls it, in a job with a launcher.
    """
    text = json.dumps(asdict(decision))
    with closing(connect()) as values:
        return values.read(_KEY) is None and values.claim(_KEY, text) == text


def decided_rollback() -> RollbackDecision | None:
    """Return the roll back on which the job has decided; None without one. Any process may call it at any time."""
    if supervisor_address() is None:
        return None
    with closing(connect()) as values:
        text, target = values.read(_KEY), values.read(_TARGET)
    if text is None:
        return None
    return replace(RollbackDecision(**json.loads(text)), restores=_target(target))


def choose_once(decision: RollbackDecision, restorable: Iterable[int]) -> int | None:
    """Choose the iteration to go back to, unless an earlier restart has chosen, and return the choice.

    Rank 0 calls it at a restart.

    Args:
        decision: decision to roll back.
        restorable: iterations that the windows on disk restore.
    """
    chosen = decision.choose(restorable)
    with closing(connect()) as values:
        return _target(values.claim(_TARGET, _NO_TARGET if chosen is None else str(chosen)))


def _target(text: str | None) -> int | None:
    return None if text in (None, _NO_TARGET) else int(text)


def _number(start: str) -> int:
    return int(start.partition(".")[2] or 0)
