"""Tables and sentences of ``moevement simulate``: the job, ETTR at each failure rate, lost time, and advice."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Column, Table

from moevement_cli.machines import copies_get
from moevement_cli.units import span
from moevement_core.planning.cluster import GB
from moevement_core.simulator.advice import MONTH_S, Advice, Choice, family, fits, node_bytes
from moevement_core.simulator.costs import Costs
from moevement_core.simulator.experiment import Cell
from moevement_core.simulator.scenario import Scenario

PARTS = {
    "checkpointing": ("save", "stalls and slow-down by checkpoints"),
    "interrupted": ("cut", "iterations that a failure cut off"),
    "detect": ("notice", "time until a failure is noticed"),
    "no spare": ("spare", "waiting for a spare"),
    "regroup": ("regroup", "time to rebuild process groups"),
    "fetch": ("fetch", "time until state is on the device"),
    "convert": ("dense", "replay until the state is dense"),
    "catch up": ("replay", "replay up to the failure"),
}
"""Column header and meaning of each part of lost time, by the simulator's name of the part."""
NEGLIGIBLE = 0.0005
"""Differences of two ETTRs below this value do not show in three digits, so they do not count as a gain."""


def print_headline(console: Console, job: Scenario, costs: Costs) -> None:
    """Print the simulated job and the assumptions."""
    shape, saved, time = job.job, job.checkpointing, costs.time
    alone = max(time.segment_s([stage]) for stage in range(time.stages))
    copies = costs.plan.inputs.replicas
    console.print(
        f"[bold]{shape.name}[/bold] on {shape.ranks} ranks ({shape.layout}): {time.total_s:.3g} s an iteration, "
        f"{alone:.3g} s for a stage that replays alone; window of {_iterations(costs.plan.size)}"
        + (f" every {costs.plan.period}" if costs.plan.period > costs.plan.size else "")
        + f" ({costs.plan.inputs.kind}); {copies} {'copy' if copies == 1 else 'copies'} on other nodes; "
        f"{copies_get(job.cluster)}; {job.run.hours:g} hours, {job.run.seeds} trainings per strategy and failure rate"
    )
    console.print(
        f"Assumed or given: {saved.detect_s:g} s to notice a failure, {saved.regroup_s:g} s to regroup, "
        f"interference {saved.interference:g}, contention {job.contention:g}"
        + (" (assumed: copies do not slow training)" if not saved.interference and not job.contention else "")
    )


def print_cells(console: Console, cells: Sequence[Cell], jobs: Sequence[Scenario]) -> None:
    """Print the ETTR at each failure rate, and lost time at the highest rate."""
    console.print(_ratio_table(cells))
    if any(not fits(cell.strategy) for cell in cells):
        console.print("[bold red]*[/bold red] needs more host memory than a node has")
    for here in _worst(cells):
        console.print(_lost_table(here))
        console.print(_counted_table(here))
    console.print("; ".join(f"{name}: {meaning}" for name, meaning in PARTS.values()))
    if not any(job.checkpointing.interference or job.contention for job in jobs):
        console.print(
            "An overhead of 0.0% is assumed, not measured: give --interference and --contention (docs/sizing.md)."
        )


def _ratio_table(cells: Sequence[Cell]) -> Table:
    count = jobs_in(cells)
    table = Table(
        "MTBF", _kept("strategy"), "every", "cost", "E[R]", "formula", _kept("simulated"),
        title="effective training time ratio; each dense strategy chooses its interval",
        caption="every: iterations between checkpoints; cost: what checkpoints add to an iteration; E[R]: expected "
        "time of a recovery",
    )  # fmt: skip
    for cell in cells:
        strategy = cell.strategy
        table.add_row(
            span(cell.mtbf_s), name_of(cell, count) + ("" if fits(strategy) else " *"),
            str(strategy.interval or "never"),
            f"{strategy.overhead_s / strategy.costs.iteration_s:.1%}", f"{strategy.expected_recovery_s():.1f} s",
            f"{cell.formula:.3f}",
            f"{cell.ettr:.3f} ± {cell.interval:.3f}" if len(cell.outcomes) > 1 else f"{cell.ettr:.3f}",
        )  # fmt: skip
    return table


def jobs_in(cells: Sequence[Cell]) -> int:
    """Return the number of different jobs."""
    return len({(cell.job, cell.ranks) for cell in cells})


def name_of(cell: Cell, jobs: int) -> str:
    """Return the name of the strategy, followed by the job if there are several."""
    return cell.strategy.name if jobs == 1 else f"{cell.strategy.name}, {cell.job} on {cell.ranks}"


def _worst(cells: Sequence[Cell]) -> Iterator[list[Cell]]:
    """Yield the cells of each job at its highest failure rate."""
    for job in dict.fromkeys((cell.job, cell.ranks) for cell in cells):
        own = [cell for cell in cells if (cell.job, cell.ranks) == job]
        worst = min(cell.mtbf_s for cell in own)
        yield [cell for cell in own if cell.mtbf_s == worst]


def _kept(header: str) -> Column:
    """Return a column that is not abbreviated on a narrow console."""
    return Column(header, no_wrap=True)


def _lost_table(here: Sequence[Cell]) -> Table:
    """Return a table of the time lost to each part, in percent of the training's time."""
    table = Table(_kept("% lost to"), *(_kept(name) for name, _ in PARTS.values()), title=_rate(here))
    for cell in here:
        table.add_row(cell.strategy.name, *(f"{100 * cell.lost[part]:.2f}" for part in PARTS))
    return table


def _counted_table(here: Sequence[Cell]) -> Table:
    """Return a table of the bytes copied and kept, and of the failures."""
    table = Table(
        _kept(""), "GB copied", "GB kept", "failures", "nested", "storage", "lost", title=_rate(here),
        caption="copied: per iteration by the heaviest rank; kept: in host memory of that rank; nested: failures "
        "during a recovery; storage: recoveries without a copy in memory; lost: lost updates of experts, in iterations",
    )  # fmt: skip
    for cell in here:
        table.add_row(
            cell.strategy.name, f"{cell.strategy.copied_bytes / GB:.3g}", f"{cell.strategy.host_bytes / GB:.3g}",
            *(
                f"{statistics.fmean(getattr(outcome, count) for outcome in cell.outcomes):.1f}"
                for count in ("failures", "during_recovery", "from_storage", "tokens_lost")
            ),
        )  # fmt: skip
    return table


def _rate(here: Sequence[Cell]) -> str:
    return f"{here[0].job}, {here[0].ranks} ranks, a failure every {span(here[0].mtbf_s)}"


def print_advice(console: Console, advice: Sequence[tuple[Scenario, Advice]]) -> None:
    """Print the best choice of each strategy at each failure rate, and the reason for the recommendation."""
    for job in {id(job): job for job, _ in advice}.values():
        own = [item for other, item in advice if other is job]
        console.print(_choice_table(job, own))
        for item in own:
            for sentence in _sentences(job, item):
                console.print(sentence)
        console.print("Not proposed, because failures lose updates of experts: moc, moetion.")


def _choice_table(job: Scenario, advice: Sequence[Advice]) -> Table:
    spares = job.failures.spares
    table = Table(
        "MTBF", _kept("strategy"), "W or every", "ETTR", "GB of a node", "lost all",
        title=f"{job.job.name}, {job.job.ranks} ranks: each strategy at its best, "
        f"{job.checkpointing.replicas} copies, {'always a spare' if spares is None else f'{spares} spares'}",
        caption="failures, spares and times are those of the table above; lost all: failures in 30 days that leave no "
        "copy in memory",
    )  # fmt: skip
    for item in advice:
        for choice in item.choices:
            table.add_row(
                span(item.mtbf_s), family(choice.strategy), _every(choice), f"{choice.ettr:.3f}",
                f"{node_bytes(choice.strategy) / GB:,.0f}" + ("" if choice.fits else " *"),
                f"{choice.lost_a_month:.2g}" if choice.strategy.in_memory else "-",
                style="bold" if choice is item.best else "",
            )  # fmt: skip
    return table


def _every(choice: Choice) -> str:
    if choice.is_sparse:
        checkpoints = choice.strategy.costs.plan
        return f"W {checkpoints.size}" + ("" if family(choice.strategy) == "redo" else f" {checkpoints.inputs.kind}")
    return f"every {choice.strategy.interval}"


def _sentences(job: Scenario, advice: Advice) -> Iterator[str]:
    best = advice.best
    yield f"A failure every {span(advice.mtbf_s)}: [bold]{best.flags}[/bold], ETTR {best.ettr:.3f}. {_gain(advice)}"
    if not best.fits:
        yield "[bold red]No strategy fits into the host memory of a node.[/bold red]"
    life = best.lost_a_month * job.until_s / MONTH_S
    if life > 1:
        yield (
            f"[bold red]{life:.1f} failures in these {job.run.hours:g} hours leave no copy in memory[/bold red]: keep "
            "windows on storage as well (--moevement-persist-dir), or more copies in memory (--replicas)."
        )
    if len(advice.by_copies) > 1:
        yield "By number of copies: " + "; ".join(
            f"{choice.copies}: ETTR {choice.ettr:.3f}, {node_bytes(choice.strategy) / GB:,.0f} GB per node, "
            f"all copies lost {choice.lost_a_month:.2g} times in 30 days"
            for choice in advice.by_copies
        )


def _gain(advice: Advice) -> str:
    """Return a sentence on the gain over the next best choice, and on the part of time that makes the difference."""
    other, decides = advice.next_best, advice.decides
    if other is None or decides is None:
        return "No other strategy was tried."
    gain, confidence = advice.gain
    name, best_share, other_share = decides
    part = PARTS[name][1]
    against = f"{family(other.strategy)} ({_every(other)})"
    if not other.fits and advice.best.fits:
        return f"It fits into host memory; {against}, ETTR {other.ettr:.3f}, does not."
    if abs(gain) < NEGLIGIBLE or (math.isfinite(confidence) and abs(gain) <= confidence):
        return f"The gain over {against}, {gain:.3f}, may be chance: choose the strategy that needs less memory."
    margin = f" ± {confidence:.3f}" if math.isfinite(confidence) else ""
    return (
        f"It gains {gain:.3f}{margin} over {against}. The largest difference is in {part}: "
        f"{best_share:.2%} of the time against {other_share:.2%}."
    )


def _iterations(count: int) -> str:
    return f"{count} iteration{'' if count == 1 else 's'}"
