"""Computation of MoEvement's figures 10c and 10d: MoC-System's K and lost tokens on six hours of the GCP trace."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from benchmarks.papers.common import Draw, table
from moevement_core.policy.dynamic_k import PLT_LIMIT
from moevement_core.simulator.costs import Costs, MoCCost
from moevement_core.simulator.failures import Failure
from moevement_core.simulator.training import TrainingOutcome, UpdatesLost, train

LABELS = ("length known", "length unknown")
"""Names of the two trainings: K follows the tokens of the whole run (equation 7), or the tokens so far."""


def trainings(costs: Costs, failures: Sequence[Failure], until_s: float) -> dict[str, TrainingOutcome]:
    """Return the trainings with MoC-System by label; they differ in the tokens to which lost tokens are compared."""
    strategies = {label: MoCCost(costs, is_length_known=label == LABELS[0]) for label in LABELS}
    return {label: train(strategy, failures, until_s) for label, strategy in strategies.items()}


def losses_at(outcome: TrainingOutcome, at_s: float, first: int) -> UpdatesLost:
    """Return the losses after the newest failure at ``at_s`` or before; without one, K is ``first``."""
    count = bisect_right(outcome.losses, at_s, key=lambda losses: losses.at_s)
    return outcome.losses[count - 1] if count else UpdatesLost(0.0, first, lost=0.0, of_run=0.0, so_far=0.0)


def figures_10c_10d(costs: Costs, failures: Sequence[Failure], until_s: float) -> tuple[str, Draw, Draw]:
    """Return the text of both figures, and the drawings of 10c and 10d.

    Args:
        costs: costs of DeepSeek-MoE.
        failures: failures before ``until_s``.
        until_s: wall seconds of the training.
    """
    outcomes, strategy = trainings(costs, failures, until_s), MoCCost(costs)
    experts, first = strategy.experts, strategy.experts_saved
    rows = []
    for hour in range(1, round(until_s / 3600) + 1):
        row = [str(hour), str(sum(failure.at_s <= hour * 3600 for failure in failures))]
        for outcome in outcomes.values():
            losses = losses_at(outcome, hour * 3600, first)
            row += [f"{losses.experts_saved} ({losses.experts_saved / experts:.1%})", f"{losses.lost:.0f}"]
            row += [f"{losses.of_run:.2%}", f"{losses.so_far:.2%}"]
        rows.append(row)

    def draw_experts(axis: Any) -> None:
        for label, outcome in outcomes.items():
            _steps(axis, outcome, label, [first, *(losses.experts_saved for losses in outcome.losses)])
        axis.set(xlabel="hours", ylim=(0, experts + 2), title=f"10c: K of MoC-System, of {experts} experts")

    def draw_lost(axis: Any) -> None:
        for label, outcome in outcomes.items():
            _steps(axis, outcome, f"{label}, of the run", [0.0, *(losses.of_run for losses in outcome.losses)])
            _steps(axis, outcome, f"{label}, so far", [0.0, *(losses.so_far for losses in outcome.losses)], "--")
        axis.axhline(PLT_LIMIT, color="grey", linewidth=1)
        axis.set(xlabel="hours", title="10d: share of lost tokens; the line is the limit")

    header = (
        "hour", "failures", "K", "iterations lost", "PLT", "of the tokens so far",
        "K, length unknown", "iterations lost", "PLT", "of the tokens so far",
    )  # fmt: skip
    known, unknown = outcomes.values()
    dense = train(MoCCost(costs, experts), failures, until_s)
    needed = PLT_LIMIT * until_s / costs.iteration_s / len(failures)
    text = f"""## Figures 10c and 10d: K and lost tokens

MoC-System on the same failures, at the implied bandwidth, after each hour. K follows the policy of a live job: each third of the limit
of {PLT_LIMIT:.2%} allows one doubling, from {first} to {experts} experts. PLT is the lost share of the tokens of the whole six hours (equation 7 of
MoC-System). On the right, the job does not know its length, so K follows the share of the tokens so far.

{table(header, rows)}

In the paper, K goes from 12.5% to 100% of the experts, and goodput falls by 71%. Here K doubles once. A failure at K = {first} loses
{known.losses[0].lost:.1f} iterations, but K would reach {experts} only if each of the {len(failures)} failures lost {needed:.0f}. The paper does not say how it counts
lost tokens. What saving all experts costs is similar: with K = {experts} from the beginning, ETTR would be {dense.ettr:.3f} instead of
{known.ettr:.3f} (left) and {unknown.ettr:.3f} (right)."""
    return text, draw_experts, draw_lost


def _steps(axis: Any, outcome: TrainingOutcome, label: str, values: Sequence[float], style: str = "-") -> None:
    hours = [0.0, *(losses.at_s / 3600 for losses in outcome.losses)]
    axis.step(hours, values, style, where="post", label=label)
