"""Roll back of a job after its loss has spiked: where it restarts, and which iterations it leaves out from then on.

The coordinator holds the decision, so every process of the job knows it, even one that joins later. A job rolls back at
most once. The job restarts as after the loss of all state, from an older window on disk, and leaves out the batches
from there up to the spike. PaLM was trained in this way by hand (arXiv 2204.02311, section 5.1).
"""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import asdict, dataclass

from moevement_core.rendezvous.value_client import connect, supervisor_address

_KEY = "job/rollback"


@dataclass(frozen=True, slots=True)
class RollbackDecision:
    """Decision to roll back."""

    spiked: int
    """Iteration in which the loss spiked."""
    restores: int
    """Iteration that the job goes back to."""
    start: str
    """Name of the job's start in which the loss spiked; windows on disk carry it (:attr:`JobNames.start`)."""
    reason: str
    """Text for the log."""

    @property
    def left_out(self) -> range:
        """Iterations that the job does not execute any more."""
        return range(self.restores + 1, self.spiked + 1)

    def is_undone(self, written_by: str, reaches: int) -> bool:
        """Return True if a window belongs to the iterations that the job has gone back from.

        Args:
            written_by: name of the job's start that wrote the window.
            reaches: iteration that the window restores.
        """
        return reaches > self.restores and _number(written_by) <= _number(self.start)


def decide_once(rollback: RollbackDecision) -> bool:
    """Decide on a roll back of the job; return False if the job has decided on one before.

    The rank that has found the spike calls it, in a job with a launcher.
    """
    text = json.dumps(asdict(rollback))
    with closing(connect()) as values:
        return values.read(_KEY) is None and values.claim(_KEY, text) == text


def decided_rollback() -> RollbackDecision | None:
    """Return the roll back on which the job has decided; None without one. Any process may call it at any time."""
    if supervisor_address() is None:
        return None
    with closing(connect()) as values:
        text = values.read(_KEY)
    return None if text is None else RollbackDecision(**json.loads(text))


def _number(start: str) -> int:
    return int(start.partition(".")[2] or 0)
