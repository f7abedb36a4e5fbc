"""Replay of a recorded run's routing through the reorder trigger. It writes reorders.md and docs/reorders.png.

    python -m benchmarks.reorders ROUTING.npz

The file holds ``tokens_per_expert``, int [records, layers, experts], and ``iteration``, int [records]: the tokens
routed to each expert at these iterations. A record stands for all iterations until the next one, so a window is one
record long.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import matplotlib
import numpy as np
import numpy.typing as npt

from benchmarks.environment import measured_on
from moevement_core.operators import Operator, OperatorKind, OperatorTable, StateBytes, expert_name
from moevement_core.policy.popularity import Order, Ordering, OrderingConfig, Popularity, order_operators
from moevement_core.policy.reorder import ReorderTrigger
from moevement_core.policy.skew import skewness
from moevement_core.policy.window import impose_window

matplotlib.use("Agg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).parents[1]
WINDOW = 3


@dataclass
class Replay:
    """Replay of the record with one ordering. The lists have one value for each window boundary."""

    label: str
    config: OrderingConfig
    changed: list[float] = field(default_factory=list)
    """Share of experts whose popularity has changed since the last reorder."""
    reordered: list[bool] = field(default_factory=list)
    frozen: list[float] = field(default_factory=list)
    """Share of the next record's tokens that a conversion with the present order would send to frozen experts."""


def main() -> None:
    """Replay every ordering, and write the page and the plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("routing", type=Path, metavar="ROUTING.npz")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".md"))
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "reorders.png")
    arguments = parser.parse_args()
    record = np.load(arguments.routing)
    tokens, iterations = record["tokens_per_expert"].astype(np.float64), record["iteration"]
    replays = [
        Replay("hard count, over the run", OrderingConfig(Ordering.HARD_COUNT)),
        Replay("capacity-normalised, equal capacity", OrderingConfig(Ordering.CAPACITY)),
        *(
            Replay(f"time-decayed, alpha {alpha}", OrderingConfig(Ordering.TIME_DECAYED, alpha))
            for alpha in (0.99, 0.9, 0.5, 0.0)
        ),
    ]
    for replay in replays:
        run(replay, tokens)
        print(f"{replay.label}: {sum(replay.reordered)} reorders", flush=True)
    draw(replays, iterations, tokens, arguments.plot)
    arguments.output.write_text(report(replays, tokens, iterations), encoding="utf-8")


def table_of(layers: int, experts: int) -> OperatorTable:
    """Return a table of all experts of the record. The trigger does not depend on the sizes in it."""
    return OperatorTable(
        Operator(expert_name(layer, expert), OperatorKind.EXPERT, StateBytes(2, 4, 8))
        for layer in range(layers)
        for expert in range(experts)
    )


def run(replay: Replay, tokens: npt.NDArray[np.float64]) -> None:
    """Replay the record window by window, and add the results to ``replay``."""
    table = table_of(*tokens.shape[1:])
    capacity = np.ones(len(table)) if replay.config.ordering is Ordering.CAPACITY else None
    popularity, trigger = Popularity(table, replay.config, capacity), ReorderTrigger(table)
    order = popularity.order()
    for counts, following in pairwise(tokens):
        popularity.observe(counts.ravel())
        replay.changed.append(trigger.changed_fraction(popularity.scores))
        replay.reordered.append(trigger.should_reorder(popularity.scores))
        if replay.reordered[-1]:
            order = popularity.order()
            trigger.ordered(popularity.scores)
        replay.frozen.append(frozen_share(table, order, following.ravel()))


def frozen_share(table: OperatorTable, order: Order, counts: npt.NDArray[np.float64]) -> float:
    """Return the share of tokens that a conversion of W - 1 iterations routes to frozen experts."""
    ends = impose_window(table, order, WINDOW).ends
    slots = np.searchsorted(ends, np.arange(len(table)), side="right")
    return float((slots * counts[order]).sum() / ((WINDOW - 1) * counts.sum()))


def oracle(tokens: npt.NDArray[np.float64]) -> float:
    """Return the frozen share of orders made from the very counts that are replayed. No ordering can exceed it."""
    table = table_of(*tokens.shape[1:])
    return float(np.mean([frozen_share(table, order_operators(table, c.ravel()), c.ravel()) for c in tokens[1:]]))


def draw(replays: Sequence[Replay], iterations: npt.NDArray[np.int64], tokens: npt.NDArray, path: Path) -> None:
    """Draw the share of changed experts, the reorders so far and the skewness over the run."""
    figure, axes = plt.subplots(3, 1, figsize=(8, 8), sharex=True, layout="constrained")
    boundaries = iterations[1:]
    for replay in replays:
        if replay.config.ordering is Ordering.CAPACITY:
            continue  # equal capacities give the order of the hard count
        axes[0].plot(boundaries, replay.changed, linewidth=0.8, label=replay.label)
        axes[1].plot(boundaries, np.cumsum(replay.reordered), linewidth=1.2, label=replay.label)
    axes[0].axhline(0.25, color="black", linewidth=0.8, linestyle="--")
    axes[0].set(ylabel="share of experts that\nchanged by more than 10%", ylim=(0, 1), title="since the last reorder")
    axes[1].set(ylabel="reorders so far", yscale="log")
    axes[1].legend(fontsize="small")
    skew = skewness(tokens)
    axes[2].fill_between(iterations, skew.min(axis=1), skew.max(axis=1), alpha=0.25, label="all layers")
    axes[2].plot(iterations, np.median(skew, axis=1), linewidth=1, label="median layer")
    axes[2].set(ylabel="skewness S", xlabel="iteration")
    axes[2].legend(fontsize="small")
    for axis in axes:
        axis.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def report(replays: Sequence[Replay], tokens: npt.NDArray[np.float64], iterations: npt.NDArray[np.int64]) -> str:
    """Return the text of the page."""
    windows, late = len(tokens) - 1, len(tokens) // 2
    best = oracle(tokens)
    rows = "\n".join(
        f"| {replay.label} | {sum(replay.reordered)} | {sum(replay.reordered[late:])} | {np.mean(replay.frozen):.3f} | "
        f"{np.mean(replay.frozen[late:]):.3f} |"
        for replay in replays
    )
    return f"""# How often each ordering would reorder

    python -m benchmarks.reorders ROUTING.npz

Gate decisions of a real GPT-MoE run ({tokens.shape[1]} layers, {tokens.shape[2]} experts, a record at every tenth iteration from {iterations[0]} to
{iterations[-1]}, from the expert-selection dataset of the SmartMoE artifact) are replayed through the trigger. With its defaults, it
reorders if at least 25% of experts have changed by more than 10%. It decides at {windows} window boundaries, one per record. "Frozen
share" is the share of the next record's expert tokens that a conversion with W = {WINDOW} sends to frozen experts, with the order of
that time. A blind order gives 0.5, and an order made from the replayed counts themselves gives {best:.3f}. The record has no gate
probabilities, so the soft count could not be replayed.

| ordering | reorders | in the second half | frozen share | in the second half |
|---|---|---|---|---|
{rows}

![reorders](../docs/reorders.png)

{measured_on("numpy")}. Deterministic.
"""


if __name__ == "__main__":
    main()
