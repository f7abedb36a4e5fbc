"""Benchmark that runs `moevement bench replay` and writes benchmarks/replay.md and .png.

python -m benchmarks.replay
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.environment import measured_on

OUTPUT = Path(__file__).with_suffix(".md")
PLOT = Path(__file__).with_suffix(".png")
COMMAND = ["bench", "replay", "--rounds", "12", "--json"]


def main() -> None:
    """Run the benchmark, write the page, and draw the plot."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    command = [str(Path(sys.executable).with_name("moevement")), *COMMAND]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    results = json.loads(printed.splitlines()[-1])
    OUTPUT.write_text(report(results), encoding="utf-8")
    draw(results, PLOT)


def report(results: dict[str, Any]) -> str:
    """Return the text of the page, from the command's JSON."""
    routings = results["routings"]
    head = " | ".join(
        f"{routing} routing (S = {routing_results['skewness']:.3f})" for routing, routing_results in routings.items()
    )
    rows = "\n".join(
        f"| {share:.0%} | "
        + " | ".join(_ratio(routing_results["ratios"][index]) for routing_results in routings.values())
        + " |"
        for index, share in enumerate(results["shares"])
    )
    normal = " | ".join(f"{routing_results['normal_s']:.2f} s" for routing_results in routings.values())
    rounds = next(iter(routings.values()))["rounds"]
    return f"""# A replayed iteration against a normal one

    moevement {" ".join(COMMAND)}        (python -m benchmarks.replay writes this file and the plot)

A 57 M parameter MoE in BF16 (4 layers, 8 experts, top 2) on {results["nproc"]} expert-parallel ranks. Iterations are replayed with a
growing share of frozen operators. Operators become active in the order of a window, the least popular first. The
popular experts and the operators that serve every token become active last. Times are ratios to the same round with nothing
frozen, as medians and quartiles of {rounds} rounds. Shares take turns within a round.

| operators frozen | {head} |
|---|{"---|" * len(routings)}
{rows}
| normal iteration | {normal} |

![time of a replayed iteration over the share of frozen operators](replay.png)

A frozen operator has no optimizer step and no weight gradient, which is one of the three matrix products of a linear
layer. With everything frozen, about two thirds of the matrix products are left. All other work does not shrink: attention's
core, norms, token dispatch, and gradient buffers, which are zeroed and reduced as before.

{measured_on("torch", "megatron-core")}, gloo; nothing was measured on a GPU. Routing is forced
(`--moe-router-force-load-balancing`, `--moe-router-force-biased`), so the loss means nothing.
"""


def _ratio(quartiles: list[float]) -> str:
    low, middle, high = quartiles
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw median and quartiles of the replay's time over the share of frozen operators."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(5.5, 3.5), layout="constrained")
    for routing, routing_results in results["routings"].items():
        low, middle, high = zip(*routing_results["ratios"], strict=True)
        axis.plot(results["shares"], middle, marker="o", label=f"{routing}, S = {routing_results['skewness']:.3f}")
        axis.fill_between(results["shares"], low, high, alpha=0.2)
    axis.set(xlabel="share of operators frozen", ylabel="time over a normal iteration", ylim=(0, 1.2))
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
