"""``moevement bench ettr``: each strategy in turn, in the same training, under the same schedule of kills."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from moevement_cli.bench_run import SCRIPT
from moevement_cli.killed_job import KilledJob, run_killed
from moevement_cli.plotting import figure
from moevement_core.errors import ConfigError
from moevement_core.simulator.experiment import half_interval

CONFIG = SCRIPT.parent / "configs" / "laptop.yaml"
OTHERS = ("--moevement-window", "auto")
STRATEGIES: dict[str, tuple[str, ...]] = {
    "moevement": ("--moevement-recovery", "replay"),
    "moevement-redo": ("--moevement-recovery", "redo"),
    "dense": ("--moevement-strategy", "dense", *OTHERS),
    "gemini": ("--moevement-strategy", "gemini", *OTHERS),
    "checkfreq": ("--moevement-strategy", "checkfreq", *OTHERS, "--moevement-persist-dir", "{windows}"),
    "moc": ("--moevement-strategy", "moc", *OTHERS),
    "moetion": ("--moevement-strategy", "moetion", *OTHERS),
    "none": ("--moevement-strategy", "none", *OTHERS),
}
"""By name, the flags of a job."""
FREE = "failure-free"


def add_to(parser: argparse.ArgumentParser) -> None:
    """Its description and arguments."""
    parser.description = (
        "Train one model with each strategy in turn while ranks are killed at random, by the same schedule for all. "
        "ETTR is the time that training takes without checkpoints and failures over the time that it took."
    )
    add = parser.add_argument
    add("--strategies", nargs="+", choices=list(STRATEGIES), default=list(STRATEGIES), help="default: all")
    add("--mtbf", type=float, nargs="+", default=[20.0], metavar="S", help="mean seconds between kills (default: 20)")
    add("--iterations", type=int, default=60, metavar="N", help="of each job (default: 60)")
    add("--repeats", type=int, default=1, metavar="R", help="schedules of kills for each MTBF (default: 1)")
    add("--seed", type=int, default=1, metavar="N", help="of the first schedule (default: 1)")
    add("--nproc", type=int, default=4, metavar="N", help="ranks (default: 4)")
    add("--spares", type=int, default=2, metavar="N", help="processes that wait (default: 2)")
    add("--config", type=Path, default=CONFIG, metavar="FILE", help="of the training (default: the laptop preset)")
    add("--plot", type=Path, metavar="FILE", help="draw ETTR over MTBF, and iterations over time")
    add("--json", action="store_true", help="print one JSON object as the last line")
    parser.set_defaults(run=ettr)


@dataclass(frozen=True)
class Sample:
    """Of one job."""

    strategy: str
    mtbf_s: float | None
    """None: nobody was killed."""
    seed: int
    training_s: float
    ettr: float
    kills: int
    repeated: int
    """Iterations that were committed more than once, or run again."""
    recovery_s: float | None
    """Median, from a kill until training went on."""
    iteration_s: float
    """Median."""
    interval: int
    """W, or iterations from one checkpoint to the next, at the end."""
    host_mb: float
    """Of a rank: snapshots, copies and logs."""
    sent_mb: float
    """To peers, in an iteration of a rank."""
    lost: float
    """Share of routed tokens whose updates recoveries lost."""
    loss: float
    """Of the last iteration."""
    bits: str
    """Of the final state, against the job without kills."""
    progress: list[tuple[float, int]]


def ettr(arguments: argparse.Namespace) -> int:
    """Run, print the table; returns the exit code."""
    if min(arguments.iterations, arguments.repeats, arguments.nproc) < 1 or min(arguments.mtbf) <= 0:
        raise ConfigError(
            f"--iterations {arguments.iterations} --repeats {arguments.repeats} --nproc {arguments.nproc} --mtbf "
            f"{min(arguments.mtbf):g}; needs 1 or more of the first three, and a time above 0"
        )
    console = Console()
    samples = list(_samples(arguments, console))
    console.print(_table(samples))
    if arguments.plot is not None:
        _plot(samples, arguments.plot)
        console.print(f"plot: {arguments.plot}")
    if arguments.json:
        print(json.dumps([asdict(one) for one in samples]))
    return 0


def _samples(arguments: argparse.Namespace, console: Console) -> Iterator[Sample]:
    with tempfile.TemporaryDirectory() as folder:
        free = _run(arguments, "none", [], 0, Path(folder, FREE), console, FREE)
        yield _sample(free, free, FREE, None, 0)
        for mtbf_s in arguments.mtbf:
            for seed in range(arguments.seed, arguments.seed + arguments.repeats):
                kills_s = _schedule(mtbf_s, seed, 100 * arguments.iterations)
                for name in arguments.strategies:
                    run_dir = Path(folder, f"{name}_{mtbf_s:g}_{seed}")
                    what = f"{name}, a kill every {mtbf_s:g} s, seed {seed}"
                    # The job that starts over each time would do so for ever.
                    few = [at for at in kills_s if at <= 2 * free.training_s] if name == "none" else kills_s
                    yield _sample(
                        _run(arguments, name, few, seed, run_dir, console, what), free, name, mtbf_s, seed
                    )  # fmt: skip


def _schedule(mtbf_s: float, seed: int, until_s: float) -> list[float]:
    """Poisson's, seconds after the first commit."""
    draw, at, kills_s = random.Random(f"{seed}/{mtbf_s}"), 0.0, list[float]()
    while (at := at + draw.expovariate(1 / mtbf_s)) < until_s:
        kills_s.append(at)
    return kills_s


def _run(
    arguments: argparse.Namespace,
    name: str,
    kills_s: Sequence[float],
    seed: int,
    run_dir: Path,
    console: Console,
    what: str,
) -> KilledJob:
    windows = str(run_dir.with_suffix(".windows"))
    words = ["--nproc", str(arguments.nproc), "--spares", str(arguments.spares), str(SCRIPT)]
    words += ["--config", str(arguments.config), "--train-iters", str(arguments.iterations)]
    words += [word.format(windows=windows) for word in STRATEGIES[name]]
    with console.status(what) as status:
        return run_killed(
            words, run_dir, kills_s, random.Random(seed),
            lambda newest: status.update(f"{what}: iteration {newest} of {arguments.iterations}"),
        )  # fmt: skip


def _sample(job: KilledJob, free: KilledJob, name: str, mtbf_s: float | None, seed: int) -> Sample:
    metrics = job.record.metrics()
    failures = [event for event in job.record.events() if event["event"] == "failure"]
    recoveries = [event for event in job.record.events() if event["event"] == "recovery"]
    checkpointing = job.record.summary().get("checkpointing") or {}

    def median(*names: str) -> float:
        return float(statistics.median(sum(line.get(one) or 0.0 for one in names) for line in metrics))

    digests = [one.record.summary()["state_digest"]["all"] for one in (job, free)]
    return Sample(
        name, mtbf_s, seed, job.training_s, free.training_s / job.training_s, len(job.kills), _repeated(job, failures),
        statistics.median(one["total_s"] for one in failures) if failures else None, median("iteration_s"),
        int(checkpointing.get("window") or 0), median("snapshot_memory_bytes", "log_memory_bytes") / 1e6,
        median("replicated_bytes") / 1e6, max((one["proportion_lost"] for one in recoveries), default=0.0),
        float(metrics[-1]["loss"]), "equal" if digests[0] == digests[1] else "DIFFERENT", job.progress,
    )  # fmt: skip


def _repeated(job: KilledJob, failures: Sequence[dict[str, Any]]) -> int:
    """What recoveries ran again, and what starts of the job went back behind."""
    replayed = sum(one["recovery"]["replayed"] for one in failures if one["recovery"])
    steps = zip(job.progress, job.progress[1:], strict=False)
    return replayed + sum(before - after + 1 for (_, before), (_, after) in steps if after <= before)


HEADER = (
    "a kill every", "strategy", "interval", "iteration", "ETTR", "kills", "repeated", "recovery", "host memory", "sent",
    "tokens lost", "last loss", "bits",
)  # fmt: skip


def rows_of(samples: Sequence[Sample]) -> list[list[str]]:
    """Returns a row of :data:`HEADER` for each strategy at each rate, over all its samples."""
    rows = []
    for mtbf_s, name in dict.fromkeys((one.mtbf_s, one.strategy) for one in samples):
        those = [one for one in samples if (one.mtbf_s, one.strategy) == (mtbf_s, name)]
        ratios = [one.ettr for one in those]
        recoveries = [one.recovery_s for one in those if one.recovery_s is not None]
        rows.append([
            "never" if mtbf_s is None else f"{mtbf_s:g} s", name, str(those[-1].interval or ""),
            f"{statistics.median(one.iteration_s for one in those):.2f} s",
            f"{statistics.fmean(ratios):.3f}" + (f" ± {half_interval(ratios):.3f}" if len(those) > 1 else ""),
            str(sum(one.kills for one in those)), str(sum(one.repeated for one in those)),
            f"{statistics.median(recoveries):.2f} s" if recoveries else "",
            f"{max(one.host_mb for one in those):.0f} MB", f"{max(one.sent_mb for one in those):.1f} MB",
            f"{max(one.lost for one in those):.2%}" if any(one.lost for one in those) else "",
            f"{statistics.fmean(one.loss for one in those):.4f}",
            "equal" if all(one.bits == "equal" for one in those) else "DIFFERENT",
        ])  # fmt: skip
    return rows


def _table(samples: Sequence[Sample]) -> Table:
    table = Table(*HEADER)
    for row in rows_of(samples):
        table.add_row(*row)
    return table


def _plot(samples: Sequence[Sample], path: Path) -> None:
    names = [name for name in dict.fromkeys(one.strategy for one in samples) if name != FREE]
    lowest = min(one.mtbf_s for one in samples if one.mtbf_s is not None)
    with figure(path, 2, (12, 4.5)) as (over_mtbf, over_time):
        for name in names:
            those = [one for one in samples if one.strategy == name]
            rates = sorted({one.mtbf_s for one in those if one.mtbf_s is not None})
            means = [statistics.fmean(one.ettr for one in those if one.mtbf_s == rate) for rate in rates]
            over_mtbf.plot(rates, means, marker="o", label=name)
            one = next(one for one in those if one.mtbf_s == lowest)
            over_time.step(*zip(*one.progress, strict=True), where="post", label=name)
        over_mtbf.set(xlabel="mean seconds between kills", ylabel="ETTR", ylim=(0, 1.05))
        over_time.set(
            xlabel="seconds", ylabel="newest committed iteration", title=f"a kill every {lowest:g} s on average"
        )
        for axes in (over_mtbf, over_time):
            axes.grid(alpha=0.3)
            axes.legend()
