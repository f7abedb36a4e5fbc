"""Simulated strategies: what each way of checkpointing costs in an iteration, and in a failure.

All strategies share one description of the job (:class:`Costs`, from a :class:`CheckpointPlan`). The code of a live run
computes windows, rollback, and which stages replay. The simulated pipeline gives the seconds of a replay.
"""

from __future__ import annotations

from collections.abc import Callable

from moevement_core.policy.window import WindowKind
from moevement_core.simulator.strategies.base import Costs, Recovery, Strategy
from moevement_core.simulator.strategies.dense import (
    CheckFreq,
    Dense,
    DenseSynchronous,
    DenseToPeers,
    Gemini,
    NoCheckpoints,
)
from moevement_core.simulator.strategies.moetion import MoEtion, Optimizations
from moevement_core.simulator.strategies.partial import MoC
from moevement_core.simulator.strategies.sparse import MoEvement, Redo, Techniques

__all__ = [
    "STRATEGIES", "CheckFreq", "Costs", "Dense", "DenseSynchronous", "DenseToPeers", "Gemini", "MoC", "MoEtion",
    "MoEvement", "NoCheckpoints", "Optimizations", "Recovery", "Redo", "Strategy", "Techniques",
]  # fmt: skip


def _sparse(
    name: str, techniques: Techniques | None = None, kind: WindowKind | None = None
) -> Callable[[Costs, float], Strategy]:
    return lambda costs, mtbf_s: MoEvement(costs, techniques, kind, name)


STRATEGIES: dict[str, Callable[[Costs, float], Strategy]] = {
    "none": lambda costs, mtbf_s: NoCheckpoints(costs),
    "dense": DenseSynchronous,
    "checkfreq": lambda costs, mtbf_s: CheckFreq(costs),
    "gemini": Gemini,
    "gemini-young-daly": lambda costs, mtbf_s: Gemini(costs, mtbf_s, is_oracle=False),
    "gemini-stalling": lambda costs, mtbf_s: Gemini(costs, mtbf_s, is_spread=False),
    "moc": lambda costs, mtbf_s: MoC(costs),
    "moetion": lambda costs, mtbf_s: MoEtion(costs),
    "redo": lambda costs, mtbf_s: Redo(costs),
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
