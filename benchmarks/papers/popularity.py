"""Popularity of experts in a recorded run, and what it saves (MoEvement figure 4, MoEtion figures 3 and 11).

    python -m benchmarks.papers.popularity ROUTING.npz        (writes popularity.md and popularity.png)

The file holds ``tokens_per_expert``, int [records, layers, experts], and ``iteration``, int [records]: the tokens
routed to each expert at these iterations. A record stands for all iterations until the next one.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.environment import measured_on
from benchmarks.papers.common import table
from benchmarks.reorders import table_of
from moevement_cli.plotting import figure
from moevement_core.operators import OperatorTable
from moevement_core.policy.partial_experts import chosen, turns
from moevement_core.policy.skew import skewness
from moevement_core.policy.tokens_at_risk import most_at_risk

OUTPUT = Path(__file__).with_suffix(".md")
SHOWN = 8
"""Number of experts of a layer that the figure shows one by one."""
SAVED = (2, 4, 8, 16)
"""Numbers of experts of each layer in a checkpoint, S."""
DRAWN = 8
"""Number S in the figure of tokens at risk."""
SHARES = (
    "iteration", "share of the most popular expert, mean of layers", "in one layer, at most", "experts with a token, mean",
    "in one layer, at least", "skewness S, median layer",
)  # fmt: skip
RISKS = ("S", "by popularity", "round robin", "round robin over popularity", "by popularity, most", "round robin, most")
Tokens = npt.NDArray[np.int64]


def main() -> None:
    """Compute the tables, draw the figures, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("routing", type=Path, metavar="ROUTING.npz")
    arguments = parser.parse_args()
    record = np.load(arguments.routing)
    tokens, iterations = record["tokens_per_expert"].astype(np.int64), record["iteration"]
    at_risk = {saved: {name: list(run) for name, run in selections(tokens, saved)} for saved in SAVED}
    with figure(OUTPUT.with_suffix(".png"), 3, (18, 5)) as axes:
        draw_shares(axes[0], tokens[:, tokens.shape[1] // 2], iterations)
        draw_active(axes[1], tokens)
        for name, risk in at_risk[DRAWN].items():
            axes[2].plot(iterations, risk, linewidth=0.8, label=name)
        axes[2].set(
            title=f"tokens at risk, {DRAWN} of {tokens.shape[2]} experts saved", xlabel="iteration", ylim=(0, 1)
        )
        for axis in axes:
            axis.grid(alpha=0.3)
            axis.legend(fontsize=7)
    OUTPUT.write_text(report(tokens, iterations, at_risk), encoding="utf-8")


def selections(tokens: Tokens, saved: int) -> Iterator[tuple[str, Iterator[float]]]:
    """Yield the name of each way to select ``saved`` experts of each layer, and its tokens at risk by record."""
    operators = table_of(*tokens.shape[1:])
    order = turns(operators)

    def round_robin(number: int, risk: Tokens) -> Tokens:
        return np.array(chosen(order, saved, number))

    def popular(number: int, risk: Tokens) -> Tokens:
        nothing_due = np.zeros(len(operators), dtype=bool)
        return np.flatnonzero(most_at_risk(operators, risk, nothing_due, saved * tokens.shape[1]))

    yield "by popularity (MoEtion)", risk_left(tokens, operators, popular)
    yield "round robin", risk_left(tokens, operators, round_robin)


def risk_left(tokens: Tokens, operators: OperatorTable, select: Any) -> Iterator[float]:
    """Yield the share of the tokens at risk that a checkpoint of some experts leaves at risk, record by record.

    Tokens are at risk from the iteration that routes them until their expert is saved.

    Args:
        tokens: tokens of each expert, ``[records, layers, E]``.
        operators: table of all experts.
        select: returns the positions of the saved experts, from the number of the checkpoint and the tokens at risk.
    """
    places = [operators.index_of[name] for name in table_of(*tokens.shape[1:]).names]
    risk = np.zeros(len(operators), dtype=np.int64)
    for number, counts in enumerate(tokens):
        risk[places] += counts.ravel()
        before = int(risk.sum())
        risk[select(number, risk)] = 0
        yield int(risk.sum()) / before if before else 0.0


def draw_shares(axis: Any, tokens: Tokens, iterations: npt.NDArray[np.int64]) -> None:
    """Draw the shares of the most loaded experts of one layer over the run, stacked."""
    shares = tokens / np.maximum(1, tokens.sum(1, keepdims=True))
    order = np.argsort(-shares.mean(0))
    tops = [shares[:, expert] for expert in order[:SHOWN]]
    labels = [f"expert {expert}" for expert in order[:SHOWN]]
    axis.stackplot(iterations, *tops, shares[:, order[SHOWN:]].sum(1), labels=[*labels, "all others"])
    axis.set(title="shares of tokens, layer in the middle", xlabel="iteration", ylim=(0, 1))


def draw_active(axis: Any, tokens: Tokens) -> None:
    """Draw the distribution of the number of experts with tokens, over iterations and layers."""
    counts = np.sort((tokens > 0).sum(2).ravel())
    axis.plot(counts, np.arange(1, counts.size + 1) / counts.size, label="all layers")
    axis.set(
        title="experts with at least one token", xlabel="experts", ylabel="share of iterations and layers", ylim=(0, 1)
    )


def report(tokens: Tokens, iterations: npt.NDArray[np.int64], at_risk: dict[int, dict[str, list[float]]]) -> str:
    """Return the text of the page."""
    layers, experts = tokens.shape[1:]
    moments = (0, len(tokens) // 10, len(tokens) // 2, len(tokens) - 1)
    shares = tokens / np.maximum(1, tokens.sum(2, keepdims=True))
    skew, active = skewness(tokens), (tokens > 0).sum(2)
    popularity = [
        [f"{iterations[moment]}", f"{shares[moment].max(1).mean():.1%}", f"{shares[moment].max():.1%}",
         f"{active[moment].mean():.1f} of {experts}", f"{active[moment].min()}", f"{np.median(skew[moment]):.3f}"]
        for moment in moments
    ]  # fmt: skip
    risks = []
    for saved, by_name in at_risk.items():
        popular, robin = (np.array(values[1:]) for values in by_name.values())
        risks.append(
            [f"{saved} of {experts}", f"{popular.mean():.1%}", f"{robin.mean():.1%}", f"{robin.mean() / popular.mean():.1f}x",
             f"{popular.max():.1%}", f"{robin.max():.1%}"]
        )  # fmt: skip
    everywhere = float((active == experts).mean())
    return f"""# Popularity of experts, and what it saves

    python -m benchmarks.papers.popularity ROUTING.npz        (writes this file and popularity.png)

![figures](popularity.png)

Gate decisions of a real GPT-MoE run ({layers} layers, {experts} experts, a record at every tenth iteration from {iterations[0]} to {iterations[-1]},
from the expert-selection dataset of the SmartMoE artifact). Everything on this page is computed from them.

## Shares of tokens (MoEvement, figure 4; MoEtion, figure 3)

{table(SHARES, popularity)}

All {experts} experts of a layer get tokens in {everywhere:.0%} of iterations and layers. In MoEvement's DeepSeek-MoE nearly all experts are active in most
iterations; its balancing loss differs. MoEtion has experts with up to 80% of the tokens of an iteration.

## Tokens at risk (MoEtion, figure 11)

Tokens are at risk from the iteration that routes them until their expert is saved. A checkpoint follows each record and holds S
experts of each layer on average. The table has the share of the tokens at risk that a checkpoint leaves at risk, without the first one.
*by popularity* is MoEtion's algorithm 1 without experts that are due; *round robin* takes experts in turn, as MoC-System does.

{table(RISKS, risks)}

The paper has twice as many tokens at risk with round robin as with its selection, and up to 80%. It saves 25% to 40% of the experts.

{measured_on("numpy")}.
"""


if __name__ == "__main__":
    main()
