"""Simulation of the large jobs that operators publish, beside their figures. It writes benchmarks/papers/field.md.

    python -m benchmarks.papers.field

Nothing is fitted. Each job has the nearest scenario of examples/simulate, the published rate of failures, and seconds of
detection and regrouping by the size of the job (moevement_core/simulator/regroup.py).
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.environment import measured_on
from benchmarks.papers.common import SEEDS, table
from benchmarks.papers.field_published import CAUSES, MIGRATED, REPORTS, RESTARTED, STEPS, Report
from moevement_cli.simulate import SCENARIOS
from moevement_cli.units import span
from moevement_core.planning.cluster import ASSUMED_SHARE, CLUSTERS, GB
from moevement_core.simulator.costs import STRATEGIES, Costs, DenseSynchronousCost, StrategyCost
from moevement_core.simulator.experiment import Cell, Draws, cell_of
from moevement_core.simulator.failures import Failure, FailureModel
from moevement_core.simulator.regroup import DETECTION_S, Constants, Notice, detection_s, regroup
from moevement_core.simulator.scenario import load
from moevement_core.simulator.training import Spares

OUTPUT = Path(__file__).with_suffix(".md")
TOTAL = sum(cause.count for cause in CAUSES)
PROCESSES = sum(cause.count for cause in CAUSES if cause.keeps_memory) / TOTAL
"""Share of failures that end processes only, by the causes of Llama 3."""
NOTICES = {notice: sum(cause.count for cause in CAUSES if cause.notice is notice) for notice in Notice}
DETECT_S = detection_s(NOTICES)
"""Mean seconds of detection, by the causes of Llama 3."""
DAY_S = 86_400.0
WIDTH = 140
"""Longest line of the page's text."""
FASTER = 11
"""Factor by which NCCLX connects faster than NCCL (a summary of arXiv 2510.20171)."""
QUICK = Constants(connect_s=Constants().connect_s / FASTER)
STORED = "restart"
"""Way without fault tolerance: the job restarts, and loads its newest checkpoint from storage."""
SPARSE = ("moevement", "redo")
WAYS = (STORED, "checkfreq", "gemini", *SPARSE)
JOBS = (
    "source", "GPUs", "simulated", "days", "time between failures", "scenario", "iteration", "restart from storage",
)  # fmt: skip
RESULTS = ("source", *WAYS)
CLAIMS = ("source", "published way", "published", "simulated as", "simulated", "off by")
PARTS = ("ranks", "fixed", "exchanges", "coordinator", "groups", "connections", "sum", "sum with NCCLX")


def main() -> None:
    """Compute the tables, and write the page."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    jobs = [(source, costs_of(source)) for source in REPORTS]
    OUTPUT.write_text(report(jobs), encoding="utf-8")


def costs_of(source: Report, constants: Constants | None = None) -> Costs:
    """Return the costs of a simulated job. Its batch grows with the data-parallel size."""
    scenario = load(SCENARIOS / f"{source.preset}.yaml", source.ranks, grows_batch=True)
    cluster = replace(
        CLUSTERS["moevement-h100"],
        network_bytes_per_s=400 * GB,
        network_share=ASSUMED_SHARE,
        storage_bytes_per_s=source.storage * GB,
    )
    costs = replace(scenario, cluster=cluster, iteration_s=source.iteration_s).costs()
    return replace(costs, detect_s=DETECT_S, regroup_s=regroup(source.ranks, constants).total_s)


def strategy_of(way: str, source: Report, costs: Costs) -> StrategyCost:
    """Return the strategy of a way. A restart from storage has the published seconds, if they are known."""
    if way != STORED:
        return STRATEGIES[way](costs, source.mtbf_s)
    restarted = replace(costs, detect_s=0.0, regroup_s=source.restart_s)
    return DenseSynchronousCost(restarted, source.mtbf_s, interval=source.interval)


def draws_of(source: Report, nodes: int) -> Draws:
    """Return the failures of all simulated trainings of a job."""
    until_s = source.days * DAY_S
    if source.spacing_s is not None:
        drawn = [spaced(source.spacing_s, nodes, until_s, seed) for seed in range(SEEDS)]
    else:
        model = FailureModel(source.mtbf_s, nodes, processes=PROCESSES)
        drawn = [model.draw(until_s, seed) for seed in range(SEEDS)]
    return Draws(source.mtbf_s, tuple(drawn))


def spaced(spacing_s: tuple[float, float], nodes: int, until_s: float, seed: int) -> list[Failure]:
    """Return losses of random nodes. The seconds from each to the next are evenly distributed over a range."""
    generator, failures, at_s = np.random.default_rng(seed), list[Failure](), 0.0
    while (at_s := at_s + float(generator.uniform(*spacing_s))) < until_s:
        failures.append(Failure(at_s, (int(generator.integers(nodes)),)))
    return failures


def simulated(source: Report, costs: Costs, ways: Iterable[str] = WAYS) -> dict[str, Cell]:
    """Return the results of each way of handling failures; all ways have the same failures."""
    draws = draws_of(source, costs.plan.inputs.nodes)
    until_s = source.days * DAY_S
    return {way: cell_of(strategy_of(way, source, costs), draws, until_s, Spares()) for way in ways}


def job_row(source: Report, costs: Costs) -> list[str]:
    """Return the row of a job in the table of jobs."""
    return [
        f"[{source.source}]({source.link})", f"{source.gpus:,}", f"{source.ranks:,}", f"{source.days:g}",
        f"{span(source.mtbf_s)} ({source.mtbf_source})", source.preset, f"{costs.iteration_s:.1f} s",
        f"{source.restart_s:g} s ({source.restart_source})",
    ]  # fmt: skip


def result_row(name: str, cells: dict[str, Cell]) -> list[str]:
    """Return the row of a job in the table of results: ETTR and seconds of a recovery of each way."""
    return [name, *(shown(cells[way]) if way in cells else "-" for way in WAYS)]


def shown(cell: Cell) -> str:
    """Return ETTR and expected seconds of a recovery as text."""
    return f"{cell.ettr:.3f} ± {cell.interval:.3f}, {cell.strategy.expected_recovery_s():.0f} s"


def claim_rows(source: Report, cells: dict[str, Cell]) -> list[list[str]]:
    """Return a row for each published figure of a job."""
    rows = []
    for claim in source.claims:
        row = [source.source, claim.way, claim.shown, "nothing", "-", "-"]
        if claim.simulated_as is not None and claim.ettr is not None:
            ettr = cells[claim.simulated_as].ettr
            row[3:] = [claim.simulated_as, f"{ettr:.3f}", f"{ettr - claim.ettr:+.3f}"]
        rows.append(row)
    return rows


def part_row(ranks: int) -> list[str]:
    """Return the parts of regrouping, in seconds."""
    parts = regroup(ranks)
    seconds = (parts.fixed_s, parts.exchange_s, parts.coordinator_s, parts.groups_s, parts.connect_s, parts.total_s)
    return [f"{ranks:,}", *(f"{value:.2f}" for value in seconds), f"{regroup(ranks, QUICK).total_s:.2f}"]


def allowed_s(ettr: float, mtbf_s: float) -> float:
    """Return the seconds that each failure may take at an effective training time ratio."""
    return (1 / ettr - 1) * mtbf_s


def cause_rows() -> list[list[str]]:
    """Return the causes of interruptions, with their detection and the fate of the host's memory."""
    return [
        [cause.name, str(cause.count), f"{cause.notice}, {DETECTION_S[cause.notice]:g} s",
         "processes" if cause.keeps_memory else "node"]
        for cause in CAUSES
    ]  # fmt: skip


def source_line(source: Report) -> str:
    """Return an item of the list of sources."""
    item = f"- **{source.source}**: {source.checked}. {source.preset}: {source.reason}."
    return textwrap.fill(item, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def report(jobs: list[tuple[Report, Costs]]) -> str:
    """Return the text of the page."""
    byterobust, llama, hsdp, torchpass = REPORTS
    cells = {source.source: simulated(source, costs) for source, costs in jobs}
    quick = simulated(hsdp, costs_of(hsdp, QUICK), SPARSE[:1])
    names = [source.source for source in REPORTS]
    results = [result_row(name, cells[name]) for name in names]
    results.insert(names.index(hsdp.source) + 1, result_row(f"{hsdp.source}, with NCCLX", quick))
    claims = [row for source in REPORTS for row in claim_rows(source, cells[source.source])]
    stored = cells[torchpass.source][STORED]
    assert torchpass.iteration_s is not None
    per_restart = (RESTARTED - MIGRATED) / (RESTARTED * 60 / torchpass.mtbf_s)
    repeated = 50 * MIGRATED / STEPS
    return f"""# Large jobs that operators publish

    python -m benchmarks.papers.field        (writes this file)

Simulations of four published jobs, beside the published figures. Nothing is measured or fitted: nobody has run this project at these
sizes. {SEEDS} trainings for each cell, the same failures for all ways, enough spares.

## The jobs

{table(JOBS, [job_row(source, costs) for source, costs in jobs])}

What we found in each source, and why its scenario is the nearest:

{chr(10).join(map(source_line, REPORTS))}

*Second-hand*: in summaries of the paper. Layouts are those of the scenarios, with more or fewer pipelines; batches grow with them.
Machines are `moevement-h100` with 400 GB/s of network, of which copies get {ASSUMED_SHARE}. Storage has 2 TB/s (Llama 3, second-hand), and
for 64 GPUs 20 GB/s (assumed). {MIGRATED * 60 / STEPS} s is {MIGRATED} minutes over {STEPS:,} steps, TorchPass's recoveries included.

## Results

ETTR, and expected seconds of a recovery. *restart*: synchronous saves to storage, at the interval of Young and Daly (TorchPass: every 100
steps), with the seconds of a restart. The other ways have detection and regrouping as below.

{table(RESULTS, results)}

{table(CLAIMS, claims)}

Off by, because:

- **ByteRobust**: the simulation has no search for a faulty machine, hangs, slow machines, or stops by users. At Llama 3's rate, 97% leaves
  {allowed_s(0.97, byterobust.mtbf_s):.0f} s for each failure.
- **Llama 3**: the figure is a lower limit. It leaves {allowed_s(0.9, llama.mtbf_s):,.0f} s for each failure; 600 s are assumed.
  Planned interruptions are not simulated.
- **FT-HSDP, 44%** is (18 - 10) / 18: all 18 minutes have a whole stall. Simulated failures also come during a stall, and stalls overlap.
- **FT-HSDP, 80%**: replicas that train on are not simulated. MoEvement stops all ranks, so the seconds of connecting decide:
  {regroup(hsdp.ranks).connect_s:.0f} s with NCCL, {regroup(hsdp.ranks, QUICK).connect_s:.0f} s with NCCLX.
  The simulation has no search for the machine and no wait for a spare.
- **TorchPass**: {MIGRATED} of {RESTARTED} minutes is {MIGRATED / RESTARTED:.2f}, the most that restarts can have. Ours take {STEPS * torchpass.iteration_s / stored.ettr / 60:.0f} minutes.
  The blog's lose {per_restart:.0f} minutes for each failure, {repeated:.0f} of them in repeated steps, so a restart took about {per_restart - repeated:.0f} minutes. Migration
  and replica groups are not simulated.

W is 1 with these links, so `gemini`, `moevement` and `redo` cost the same; [redo.md](redo.md) has narrower links.

## Detection and regrouping

Llama 3's {TOTAL} interruptions (table 5; its 30.1% for faulty GPUs does not fit 148). Notice ([leases.md](../../docs/leases.md)) and loss are
our reading: a GPU's failure ends a process, and the job replaces the node.

{table(("cause", "count", "noticed by", "lost"), cause_rows())}

On average {DETECT_S:.2f} s; {PROCESSES:.0%} end processes only. All jobs have this mix, but TorchPass's failures always take a node.
Silent corruption counts as noticed.

Seconds of regrouping (`moevement_core/simulator/regroup.py`):

{table(PARTS, [part_row(source.ranks) for source in REPORTS])}

- *fixed*, *groups*: measured ([regroup.md](../regroup.md)) with four ranks, and with 16,384 ranks without connections; linear in N.
- *coordinator*: 14 µs a request, measured ([commit_point.md](../../docs/commit_point.md)); ten requests a rank, assumed.
- *exchanges*: ten over a tree with fan-out 4; hops of 100 µs and 1 GB/s, assumed.
- *connections*: [second-hand](https://rajatbisht.net/paper_summaries/brief_summary/0019_NCCLX.html), 265 s for NCCL on 96,000 GPUs
  ([arXiv 2510.20171](https://arxiv.org/abs/2510.20171)); NCCLX starts [{FASTER} times](https://alphaxiv.org/overview/2510.20171v4) faster.
  Linear in N, which is too much for fewer GPUs.

{measured_on("numpy")}.
"""


if __name__ == "__main__":
    main()
