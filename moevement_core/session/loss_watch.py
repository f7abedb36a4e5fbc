"""Watch over the loss: a spike makes the job roll back to an older window, once (``--moevement-rollback-on-spike``)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

from moevement_core.errors import ConfigError
from moevement_core.restart.generation import Regroup
from moevement_core.restart.in_process import is_restarted_in_process
from moevement_core.run.events import LossSpiked
from moevement_core.saving.rollback import RollbackDecision, decide_once, decided_rollback
from moevement_core.saving.saving import Saving
from moevement_core.session.run_directory import number
from moevement_core.storage.config import FEWEST_BACK, ON_SPIKE, RollbackConfig
from moevement_core.trainer.capabilities import leave_out
from moevement_core.trainer.interface import BindingInterface

LOSSES = 100
"""Number of earlier iterations with whose median loss an iteration is compared."""
FEWEST_LOSSES = 20
"""Smallest number of earlier losses for a comparison."""
LOSS = "lm loss"
"""Name of the loss that counts if a trainer has several, as Megatron has for experts; otherwise the first."""


class LossWatch:
    """Watch of one rank over the job's loss. Only the last rank looks at losses, because it has those of a pipeline.

    A process that becomes the last rank after a failure collects losses anew.

    Args:
        config: size of a spike, and how far the job goes back.
        saving: saving of this rank's snapshots.
        rollback: roll back that the job has completed; None if it has completed none.
    """

    def __init__(self, config: RollbackConfig, saving: Saving, rollback: RollbackDecision | None) -> None:
        self._config, self._saving, self._completed = config, saving, rollback
        self._losses = deque[float](maxlen=LOSSES)

    def pending(self) -> RollbackDecision | None:
        """Return the roll back on which the job has decided, if it has yet to go back; otherwise None.

        Every survivor calls it after a failure.
        """
        if not self._config.is_on or self._completed is not None:
            return None
        return decided_rollback()

    def ended(self, committed: int, outcome: Mapping[str, Any]) -> None:
        """Look at the loss of an iteration.

        Args:
            committed: number of the iteration.
            outcome: results of the iteration, as for :meth:`Session.end_iteration`; this method reads the loss.

        Raises:
            Exception: the loss has spiked; the exception leads to the next generation, in which the job rolls back.
        """
        topology, losses = self._saving.topology, outcome["losses"]
        if not self._config.is_on or topology.rank != topology.world - 1 or outcome["skipped"] or not losses:
            return
        loss = float(losses.get(LOSS, next(iter(losses.values()))))
        middle = median(self._losses) if len(self._losses) >= FEWEST_LOSSES else None
        if middle is not None and self._is_spike(loss, middle):
            self._roll_back(committed, loss, middle)
        elif math.isfinite(loss):
            self._losses.append(loss)

    def _is_spike(self, loss: float, middle: float) -> bool:
        assert self._config.on_spike is not None
        return not math.isfinite(loss) or 0 < self._config.on_spike * middle < loss

    def _roll_back(self, spiked: int, loss: float, middle: float) -> None:
        """Decide that the job goes back, and leave the generation; only report if the job cannot go back."""
        text = (
            f"the loss of iteration {spiked} is {loss:.4g}, and the median of the {len(self._losses)} iterations "
            f"before is {middle:.4g}"
        )
        self._losses.clear()  # so that a loss that stays as large is reported once
        disk, by = self._saving.disk, self._config.by or FEWEST_BACK
        decision = RollbackDecision(spiked, by, disk.job_name, text)
        if self._completed is not None:
            why_not = "the job has rolled back before"
        elif decision.choose(disk.restorable()) is None:
            why_not = "no window on disk restores an earlier iteration"
        else:
            why_not = "" if decide_once(decision) else "the job has rolled back before"
        text += f"; the job goes on, because {why_not}" if why_not else "; the job goes back to an older window"
        self._saving.reports.report(text)
        event = LossSpiked(text, iteration=spiked, loss=number(loss), median=middle, rolls_back=not why_not)
        self._saving.reports.event(event)
        if not why_not:
            raise Regroup


def refuse_if_unable(config: RollbackConfig, binding: BindingInterface) -> None:
    """Refuse to watch the loss of a job that cannot roll back. Every rank calls it.

    Raises:
        ConfigError: the job has no launcher, or its trainer cannot leave out iterations.
    """
    if not config.is_on:
        return
    if not is_restarted_in_process():
        raise ConfigError(f"{ON_SPIKE} without `moevement launch --spares`, which restarts the job; start it so")
    leave_out(binding, ())
