"""Outcome of the newest iteration of an elastic job, collected from survivors after a failure.

The failure may have come before the job wrote the iteration's line of ``metrics.jsonl``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron.moevement.elastic.pieces import RankPosition
from megatron.moevement.elastic.survivor_state import SurvivorState
from moevement_core.comms.codec import Plain
from moevement_core.comms.exchange import all_gather_objects


@dataclass(frozen=True)
class IterationOutcome:
    """Losses and outcome of the optimizer step of one iteration, for the iteration's line of ``metrics.jsonl``."""

    losses: Mapping[str, torch.Tensor]
    """Mean losses by name; empty if a rank that had computed a part of the losses failed."""
    outcome: Mapping[str, Any]
    """Outcome of the iteration's optimizer step."""


def newest_outcome(survivor: SurvivorState | None, iteration: int) -> IterationOutcome | None:
    """Return the losses and the step outcome of ``iteration``; None if no survivor has them. Collective.

    Args:
        survivor: state that this rank brings; None if the rank is new.
        iteration: newest iteration that any rank has committed.
    """
    from megatron.training import get_args

    mark = survivor.mark if survivor is not None else None
    is_live = survivor is not None and mark is not None and mark.iteration == iteration
    own = None
    if is_live and survivor is not None and mark is not None:
        own = (
            survivor.stand,
            Plain((dict(survivor.losses) if survivor.losses is not None else None, dict(mark.outcome))),
        )
    sent = [report for report in all_gather_objects(own, tuple[RankPosition, Plain] | None) if report is not None]
    known = [(stand, *report.value) for stand, report in sent]
    outcome = next((outcome for _, _, outcome in known if outcome), None)
    if outcome is None:
        return None
    last = {stand: losses for stand, losses, _ in known if losses is not None and stand.tensor == 0}
    args = get_args()
    ranks = args.pipeline_model_parallel_size * args.tensor_model_parallel_size
    if not last or len(last) < next(iter(last)).world // ranks:
        return IterationOutcome({}, outcome)
    sums = [losses for _, losses in sorted(last.items(), key=lambda item: item[0].rank)]
    totals = {name: torch.stack([losses[name] for losses in sums]).sum(dim=0) for name in sums[0]}
    return IterationOutcome({name: total[0] / total[1] for name, total in totals.items()}, outcome)
