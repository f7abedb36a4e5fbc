"""Computation of MoEvement's figures 1, 10, 11, 13, 15 and 16. It writes benchmarks/papers/figures.md and figures.png.

    python -m benchmarks.papers.figures [--trace gcp.csv]

Each figure is computed at the bandwidths that the paper states. Some measurements do not fit these bandwidths, so most
figures are computed at an implied bandwidth as well. It follows from a statement of the paper: with a checkpoint in
every iteration, Gemini slows DeepSeek-MoE 2.5 times.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.environment import measured_on
from benchmarks.papers import common
from benchmarks.papers.common import Draw, at_bandwidth, implied_bandwidth, scenario, simulated, table
from benchmarks.papers.lost_tokens import figures_10c_10d
from benchmarks.papers.published import (
    GEMINI_BEST,
    GEMINI_EVERY_ITERATION,
    GOODPUT_RATIOS,
    MODELS,
    MTBFS_S,
    SCALED,
    SKEW_ALPHAS,
    SKEWED,
)
from moevement_cli.plotting import figure
from moevement_core.planning.checkpoint_plan import CheckpointPlan
from moevement_core.simulator.costs import CheckFreqCost, Costs, MoCCost, MoEvementCost, Techniques
from moevement_core.simulator.failures import Failure, recorded
from moevement_core.simulator.training import train

OUTPUT = Path(__file__).with_suffix(".md")
SYSTEMS = ("checkfreq", "gemini", "moc", "moevement")
INTERVALS = (1, 5, 10, 20, 30, 50, 75, 100, 150, 200, 300)
GB = 1e9
TRACE_S = 6 * 3600.0
"""Seconds of the GCP trace that figure 10 has."""


def main() -> None:
    """Compute and draw all figures, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="GCP trace (default: leave figure 10 out)")
    arguments = parser.parse_args()
    stated = scenario("deepseek_moe").costs()
    bandwidth = implied_bandwidth(stated, GEMINI_EVERY_ITERATION * stated.iteration_s)
    slow = at_bandwidth(stated, bandwidth)
    figures = [
        figure_1(stated, slow),
        *figures_10(stated, slow, arguments.trace),
        figure_11(),
        figure_13(),
        figure_15(stated),
        figure_16(stated, slow),
    ]
    with figure(OUTPUT.with_suffix(".png"), 4, (24, 9), rows=2) as axes:
        for axis, (_, draw) in zip(axes, figures, strict=True):
            draw(axis)
            axis.grid(alpha=0.3)
            if axis.get_legend_handles_labels()[0]:
                axis.legend(fontsize=7)
    OUTPUT.write_text(report([text for text, _ in figures if text], stated, bandwidth), encoding="utf-8")


def figure_1(stated: Costs, slow: Costs) -> tuple[str, Draw]:
    """Return the text and drawing of figure 1: Gemini's overhead and recovery by interval, and its best ETTR."""
    rows = []
    for interval in INTERVALS:
        at_stated, at_implied = (common.gemini(costs, 3600.0, interval) for costs in (stated, slow))
        rows.append(
            [interval,
             *(f"{strategy.overhead_s / strategy.costs.iteration_s:.1%}" for strategy in (at_stated, at_implied)),
             *(f"{strategy.expected_recovery_s():.0f} s" for strategy in (at_stated, at_implied))]
        )  # fmt: skip
    best = [
        [f"{mtbf_s / 60:g} min", f"{published:.2f}",
         *(f"{strategy.analytic_ettr(mtbf_s):.3f} (every {strategy.interval})"
           for strategy in (common.gemini(costs, mtbf_s) for costs in (stated, slow)))]
        for mtbf_s, published in GEMINI_BEST.items()
    ]  # fmt: skip

    def draw(axis: Any) -> None:
        for mtbf_s in GEMINI_BEST:
            ratios = [common.gemini(slow, mtbf_s, interval).analytic_ettr(mtbf_s) for interval in INTERVALS]
            axis.plot(INTERVALS, ratios, marker="o", label=f"a failure every {mtbf_s / 60:g} min")
        axis.set(xscale="log", xlabel="interval", ylim=(0, 1), title="1: ETTR of Gemini at the implied bandwidth")

    text = f"""## Figure 1: Gemini on DeepSeek-MoE

{table(("interval", "overhead, stated", "implied", "E[R], stated", "implied"), rows)}

{table(("MTBF", "best ETTR, published", "stated", "implied"), best)}

The overhead at an interval of 1 is the fitted value (150%). The published best ETTR falls much faster. At a failure every ten
minutes, 0.47 means that a failure costs more than 500 s at any interval, but half of the best interval is well below 100 s. So
recoveries there take time that is not in the formula, for example to restart processes and to load."""
    return text, draw


def figures_10(stated: Costs, slow: Costs, trace: Path | None) -> list[tuple[str, Draw]]:
    """Return the texts and drawings of figures 10b, 10c and 10d; the text of 10c is also that of 10d."""
    if trace is None:
        return [("## Figure 10: the GCP trace\n\nLeft out: no --trace.", _draw_nothing), *[("", _draw_nothing)] * 2]
    failures = [failure for failure in recorded(trace, stated.plan.inputs.nodes) if failure.at_s < TRACE_S]
    text, draw_experts, draw_lost = figures_10c_10d(slow, failures, TRACE_S)
    return [figure_10b(stated, slow, failures), (text, draw_experts), ("", draw_lost)]


def _draw_nothing(axis: Any) -> None:
    axis.set(title="10: no trace")


def figure_10b(stated: Costs, slow: Costs, failures: Sequence[Failure]) -> tuple[str, Draw]:
    """Return the text and drawing of figure 10b: goodput on six hours of the GCP trace."""
    rows, lines = [], {}
    for name in SYSTEMS:
        trained = [train(common.SYSTEMS[name](costs, 1140.0), failures, TRACE_S) for costs in (stated, slow)]
        lines[name] = trained[1]
        rows.append((name, trained))
    own = rows[-1][1]
    body = [
        [name, f"{GOODPUT_RATIOS[name]:.2f}" if name in GOODPUT_RATIOS else "1",
         *(f"{own_result.iterations / result.iterations:.2f}" for own_result, result in zip(own, trained, strict=True)),
         *(f"{result.ettr:.3f}" for result in trained), f"{trained[1].tokens_lost:.0f}"]
        for name, trained in rows
    ]  # fmt: skip

    def draw(axis: Any) -> None:
        for name, trained in lines.items():
            points = [(0.0, 0), *trained.goodput]
            axis.plot([at / 3600 for at, _ in points], [count for _, count in points], label=name)
        axis.set(xlabel="hours", title="10b: iterations on the GCP trace, implied bandwidth")

    header = (
        "system", "MoEvement's goodput over it, published", "stated", "implied", "ETTR, stated", "implied",
        "iterations' updates lost, implied",
    )  # fmt: skip
    return (
        f"""## Figure 10: the GCP trace

In the first six hours of the trace, nodes leave at {len(failures)} moments. (The paper counts 24 failures, and does not
say in which six hours.) Node numbers are taken modulo {stated.plan.inputs.nodes}.

{table(header, body)}

At the implied bandwidth the ratios to CheckFreq and Gemini are nearly the published ones. The ratio to MoC is not, because MoC saves
few experts here until the end (figure 10c).""",
        draw,
    )


def figure_11() -> tuple[str, Draw]:
    """Return the text and drawing of figure 11: ETTR over scale."""
    rows, curves = [], {}
    for preset, known in SCALED.items():
        costs = scenario(preset).costs()
        job = costs.plan.inputs.job
        for name in ("gemini", "moevement"):
            values = {mtbf_s: simulated(common.SYSTEMS[name](costs, mtbf_s), mtbf_s) for mtbf_s in (3600, 1800, 600)}
            curves[preset, name] = values
            rows.append(
                [preset, job.ranks, f"{costs.iteration_s:.1f} s", name,
                 *(f"{value:.3f}" + (f" (published {known[name, mtbf_s]})" if (name, mtbf_s) in known else "")
                   for mtbf_s, value in values.items())]
            )  # fmt: skip

    def draw(axis: Any) -> None:
        for (preset, name), values in curves.items():
            style = "-" if name == "moevement" else "--"
            axis.plot(
                [mtbf_s / 60 for mtbf_s in values], list(values.values()), style, marker="o", label=f"{name}, {preset}"
            )
        axis.set(xlabel="minutes between failures", ylim=(0.8, 1), title="11: ETTR over scale, stated bandwidths")

    return (
        f"""## Figure 11: 32 B to 671 B

{table(("model", "GPUs", "iteration", "system", "1 h", "30 min", "10 min"), rows)}

The paper says that MoEvement stays above 0.91 with a failure every hour at all scales, and so it does here. Batch, sequence and
iteration time are not published (examples/simulate says what is assumed). The state of each stage is sharded over 256 data-
parallel ranks, so each rank has little to save, and Gemini's dense checkpoints overlap with training as well. The remaining
difference is whether all stages replay, or only one.""",
        draw,
    )


def figure_13() -> tuple[str, Draw]:
    """Return the text and drawing of figure 13: recovery time with one technique after the other."""
    steps = {
        "sparse": Techniques(False, False, False), "and skipping": Techniques(True, False, False),
        "and reordering": Techniques(True, True, False), "and upstream logs": Techniques(),
    }  # fmt: skip
    rows, bars = [], {}
    for model in MODELS:
        costs = scenario(model.preset).costs()
        window = next(system.interval for system in model.systems if system.name == "moevement")
        plan = CheckpointPlan(replace(costs.plan.inputs, window=window))
        costs = replace(costs, plan=plan, skew=0.25)
        strategies = {name: MoEvementCost(costs, techniques) for name, techniques in steps.items()}
        bars[model.preset] = [strategy.expected_recovery_s() for strategy in strategies.values()]
        rows.append(
            [model.preset, f"{model.sparse_only:.2f}", "0.97",
             *(f"{strategy.expected_recovery_s():.1f} s, {simulated(strategy, 600):.3f}"
               for strategy in strategies.values())]
        )  # fmt: skip

    def draw(axis: Any) -> None:
        width = 0.2
        for number, name in enumerate(steps):
            axis.bar(
                np.arange(len(bars)) + width * number,
                [recoveries[number] for recoveries in bars.values()],
                width,
                label=name,
            )
        axis.set_xticks(np.arange(len(bars)) + 1.5 * width, list(bars))
        axis.set(title="13: E[R] in seconds, one technique after the other")

    header = ("model", "ETTR with sparse alone, published", "with all", *(f"E[R], ETTR: {name}" for name in steps))
    return (
        f"""## Figure 13: what each technique adds

Published W, skew 0.25, a failure every ten minutes (the figure does not say which rate), stated bandwidths.

{table(header, rows)}

The published 0.37 to 0.57 for sparse checkpoints alone mean 450 to 1000 s per failure, with a failure every ten minutes. But all
stages replay W = 3 to 6 iterations of 2 to 3 s in 10 to 40 s. For the deep pipelines, the techniques have the same order as in the
paper (logs add most). Reordering adds little, because weight gradients are a third of an expert's work, and W is short.""",
        draw,
    )


def figure_15(costs: Costs) -> tuple[str, Draw]:
    """Return the text and drawing of figure 15: the number of experts, out of 64, that get a token in an iteration."""
    generator = np.random.default_rng(0)
    experts, draws = 64, 400
    job = costs.plan.inputs.job
    tokens = job.tokens * job.micro_batches * job.data_parallel * job.experts_per_token
    rows, boxes = [], {}
    for skew, alpha in ((0.0, np.inf), *SKEW_ALPHAS.items()):
        if np.isinf(alpha):
            counts = np.full(draws, experts)
        else:
            # Compute logarithms of the Dirichlet shares: with such a small alpha, most shares underflow a double.
            logs = np.log(generator.random((draws, experts))) / alpha
            shares = np.exp(logs - np.log(np.exp(logs - logs.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True))
                            - logs.max(axis=1, keepdims=True))  # fmt: skip
            counts = (generator.poisson(shares * tokens) > 0).sum(axis=1)
        boxes[skew] = counts
        rows.append([skew, alpha, *(f"{value:.0f}" for value in np.percentile(counts, (25, 50, 75)))])

    def draw(axis: Any) -> None:
        axis.boxplot(list(boxes.values()), tick_labels=[str(skew) for skew in boxes])
        axis.set(xlabel="skew", title="15: experts of 64 with a token, by Dirichlet shares")

    return (
        f"""## Figure 15: active experts

The experts' shares of tokens are drawn from the Dirichlet distribution of appendix D, with {tokens / 1e6:.1f} M choices of an expert in an iteration.

{table(("skew", "alpha", "first quartile", "median", "third quartile"), rows)}

With the parameters of the appendix, half of the experts get no token at a skew of 0.25, and most get none at 0.5. With alpha =
0.000158 one expert has all tokens. The published boxes show most experts active. So popularity was not constant during an iteration,
as the appendix has it, or it was drawn several times in an iteration.""",
        draw,
    )


def figure_16(stated: Costs, slow: Costs) -> tuple[str, Draw]:
    """Return the text and drawing of figure 16: ETTR over skew at a failure every ten minutes."""
    skews = (0.0, *SKEW_ALPHAS)
    window = replace(stated, plan=CheckpointPlan(replace(stated.plan.inputs, window=6)))
    rows, curves = [], {}
    for name in SYSTEMS:
        values = [
            [simulated(common.SYSTEMS[name](replace(costs, skew=skew), 600.0), 600.0) for skew in skews]
            for costs in (window, slow)
        ]
        curves[name] = values[0]
        known = f"{SKEWED[name][0]} to {SKEWED[name][1]}" if name in SKEWED else "0.95 at 0, rising"
        rows.append([name, known, *(", ".join(f"{ettr:.3f}" for ettr in line) for line in values)])
    frozen = [MoEvementCost(replace(window, skew=skew)).frozen_share for skew in skews]

    def draw(axis: Any) -> None:
        for name, line in curves.items():
            axis.plot(skews, line, marker="o", label=name)
        axis.set(xlabel="skew", ylim=(0.8, 1), title="16: ETTR over skew, stated bandwidths")

    return (
        f"""## Figure 16: ETTR over skew

A failure every ten minutes, skew {", ".join(map(str, skews))}; MoEvement at W = 6 in the first column.

{table(("system", "published", "stated bandwidths", "implied"), rows)}

The share of a replay's work that is frozen rises with skew, {", ".join(f"{share:.2f}" for share in frozen)}, as the paper says.
This changes only the third decimal of ETTR, because a replay is short compared with ten minutes. CheckFreq and Gemini do not
depend on skew. MoC ({MoCCost(stated).experts_saved} of 64 experts at first) loses more with some failures and less with others. On
average, its round robin is as stale for a popular expert as for any other.""",
        draw,
    )


def report(parts: list[str], stated: Costs, bandwidth: float) -> str:
    """Return the text of the page."""
    text = "\n\n".join(parts)
    return f"""# MoEvement's figures again

    python -m benchmarks.papers.figures --trace gcp.csv        (writes this file and figures.png)

![figures](figures.png)

**Stated** bandwidths: 12 nodes of 80 Gb/s, 40 Gb/s of storage, 25 GB/s from device to host (assumed). **Implied** bandwidth: the full
state of DeepSeek-MoE ({stated.job_bytes / GB:.0f} GB, {stated.full_bytes / GB:.2f} GB on the heaviest rank) in {GEMINI_EVERY_ITERATION} iterations of
{stated.iteration_s:.2f} s, because figure 1a has this slow-down with a checkpoint in every iteration. That is {bandwidth / GB:.1f} GB/s of all
{stated.plan.inputs.job.ranks} ranks together; 12 nodes could send 120. CheckFreq saves every {CheckFreqCost(stated).interval} iterations at the stated bandwidths. Unless said otherwise, MTBF is {MTBFS_S[-1] / 60:g} minutes, and a training
lasts 12 hours. A failure takes 1 s to detect and 10 s to regroup. Simulated values are means of 20 trainings.

{text}

{measured_on("numpy")}.
"""


if __name__ == "__main__":
    main()
