"""Simulated strategies: what each way of checkpointing costs in an iteration, and in a failure.

All strategies share one description of the job (:class:`Costs`, from a :class:`CheckpointPlan`). The code of a live run
computes windows, rollback, and which stages replay. The simulated pipeline gives the seconds of a replay.
"""

from __future__ import annotations

from collections.abc import Callable

from moevement_core.policy.window import WindowKind
from moevement_core.simulator.costs.costs import Costs
from moevement_core.simulator.costs.dense_cost import (
    CheckFreqCost,
    DenseCost,
    DenseSynchronousCost,
    DenseToPeersCost,
    GeminiCost,
    NoCheckpointsCost,
)
from moevement_core.simulator.costs.moetion_cost import MoEtionCost, Optimizations
from moevement_core.simulator.costs.partial_cost import MoCCost
from moevement_core.simulator.costs.sparse_cost import MoEvementCost, RedoCost, Techniques
from moevement_core.simulator.costs.strategy_cost import LostState, RecoveryCost, StrategyCost

__all__ = [
    "STRATEGIES", "CheckFreqCost", "Costs", "DenseCost", "DenseSynchronousCost", "DenseToPeersCost", "GeminiCost",
    "LostState", "MoCCost", "MoEtionCost", "MoEvementCost", "NoCheckpointsCost", "Optimizations", "RecoveryCost",
    "RedoCost", "StrategyCost", "Techniques",
]  # fmt: skip


def _sparse(
    name: str, techniques: Techniques | None = None, kind: WindowKind | None = None
) -> Callable[[Costs, float], StrategyCost]:
    return lambda costs, mtbf_s: MoEvementCost(costs, techniques, kind, name)


STRATEGIES: dict[str, Callable[[Costs, float], StrategyCost]] = {
    "none": lambda costs, mtbf_s: NoCheckpointsCost(costs),
    "dense": DenseSynchronousCost,
    "checkfreq": lambda costs, mtbf_s: CheckFreqCost(costs),
    "gemini": GeminiCost,
    "gemini-young-daly": lambda costs, mtbf_s: GeminiCost(costs, mtbf_s, is_oracle=False),
    "gemini-stalling": lambda costs, mtbf_s: GeminiCost(costs, mtbf_s, is_spread=False),
    "moc": lambda costs, mtbf_s: MoCCost(costs),
    "moetion": lambda costs, mtbf_s: MoEtionCost(costs),
    "redo": lambda costs, mtbf_s: RedoCost(costs),
    **{
        name: _sparse(name, techniques, kind)
        for name, techniques, kind in (
            ("moevement", None, None),
            ("moevement-aligned", None, WindowKind.ALIGNED),
            ("moevement-rolling", None, WindowKind.ROLLING),
            ("moevement-all-stages", Techniques(is_local=False), None),
            ("moevement-all-gradients", Techniques(skips_frozen=False), None),
            ("moevement-no-reorder", Techniques(reorders=False), None),
            ("moevement-sparse-only", Techniques(False, False, False), None),
        )
    },
}
"""Constructors of strategies, by name. They take the costs of the job, and the mean seconds between its failures."""
