"""Command ``moevement bench ettr``, which runs each strategy in the same training under the same schedule of kills."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from moevement_cli.bench_run import SCRIPT
from moevement_cli.ettr_prediction import OverLinks, predicted
from moevement_cli.ettr_samples import FREE, HEADER, NEVER, JobSample, plot, rows_of, sample_of
from moevement_cli.killed_job import KilledJob, run_killed
from moevement_cli.outputs import check_output
from moevement_core.errors import ConfigError
from moevement_core.launching import config_file
from moevement_core.simulator.failures import Failure, FailureModel, mean_time_between, recorded
from moevement_core.simulator.scenario import load
from moevement_core.util.numbers import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE

CONFIG = SCRIPT.parent / "configs" / "laptop.yaml"
OTHERS = ("--moevement-window", "auto")
STRATEGIES: dict[str, tuple[str, ...]] = {
    "moevement": ("--moevement-recovery", "replay"),
    "moevement-redo": ("--moevement-recovery", "redo"),
    "moevement-auto": ("--moevement-recovery", "auto"),
    "dense": ("--moevement-strategy", "dense", *OTHERS),
    "gemini": ("--moevement-strategy", "gemini", *OTHERS),
    "checkfreq": ("--moevement-strategy", "checkfreq", *OTHERS, "--moevement-persist-dir", "{windows}"),
    "moc": ("--moevement-strategy", "moc", *OTHERS, "--moevement-dense-interval", "1"),
    "moetion": ("--moevement-strategy", "moetion", *OTHERS),
    "none": ("--moevement-strategy", "none", *OTHERS),
}
"""Flags of a job, by the name of its strategy."""
SHOWN = ("a kill every", "strategy", "ETTR", "predicted", "kills", "repeated", "tokens lost", "bits")
"""Columns shown on the console. The benchmark's page has all columns."""


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the description and arguments of ``moevement bench ettr``."""
    parser.description = (
        "Train the same model with each strategy in turn, and kill ranks at the same times in all jobs. ETTR is "
        "the training time without checkpoints and failures, divided by the measured training time. It is computed as "
        "the share of time not lost to failures, divided by 1 + the share of training time that saving costs."
    )
    add = parser.add_argument
    add(
        "--strategies",
        nargs="+",
        choices=list(STRATEGIES),
        default=list(STRATEGIES),
        help="strategies to measure (default: all)",
    )
    add("--mtbf", type=float, nargs="*", default=[20.0], metavar="S", help="mean seconds between kills (default: 20)")
    add("--trace", type=Path, metavar="FILE", help="also kill as in this trace; a line is milliseconds,add|remove,NODE")
    add("--speedup", type=float, default=1.0, metavar="X", help="play the trace X times as fast (default: 1)")
    add("--iterations", type=int, default=60, metavar="N", help="iterations of each job (default: 60)")
    add("--repeats", type=int, default=1, metavar="R", help="random schedules of kills for each --mtbf (default: 1)")
    add("--seed", type=int, default=1, metavar="N", help="seed of the first schedule (default: 1)")
    add("--nproc", type=int, default=4, metavar="N", help="number of ranks (default: 4)")
    add("--spares", type=int, default=2, metavar="N", help="number of spares (default: 2)")
    add("--config", type=Path, default=CONFIG, metavar="FILE", help="YAML file of flags (default: the laptop preset)")
    add("--scenario", type=Path, metavar="FILE", help="scenario of the same training, to predict each ETTR")
    add("--plot", type=Path, metavar="FILE", help="plot ETTR over MTBF, iterations over time, and losses")
    add("--json", action="store_true", help="print one JSON object as the last line")
    parser.set_defaults(run=ettr)


@dataclass(frozen=True)
class KillSchedule:
    """Schedule of kills for one job."""

    name: str
    mtbf_s: float | None
    seed: int
    failures: Sequence[Failure]

    def __str__(self) -> str:
        return "no kills" if self.mtbf_s is None else f"a kill every {self.name}, seed {self.seed}"


def ettr(arguments: argparse.Namespace) -> int:
    """Run a job for each strategy and schedule, print the table, and return the exit code."""
    for name, bounds in (("iterations", AT_LEAST_ONE), ("repeats", AT_LEAST_ONE), ("nproc", AT_LEAST_ONE),
                      ("speedup", POSITIVE), ("spares", NOT_NEGATIVE), ("seed", NOT_NEGATIVE)):  # fmt: skip
        bounds.check(f"--{name}", getattr(arguments, name))
    for mtbf_s in arguments.mtbf:
        POSITIVE.check("--mtbf", mtbf_s)
    config_file.flags_of(arguments.config)
    check_output("--plot", arguments.plot)
    scenario = load(arguments.scenario) if arguments.scenario is not None else None
    schedules, console = _schedules(arguments), Console()
    if scenario is not None and scenario.job.ranks != arguments.nproc:
        raise ConfigError(
            f"--scenario has {scenario.job.ranks} ranks, but --nproc is {arguments.nproc}; both numbers must be equal"
        )
    samples = list(_samples(arguments, schedules, console))
    if scenario is not None:
        (samples,) = predicted([OverLinks(scenario, samples)])
    _print(samples, console)
    try:
        if arguments.plot is not None:
            plot(samples, arguments.plot)
            console.print(f"plot: {arguments.plot}")
    finally:  # A failed plot must not lose the samples, which may have taken an hour.
        if arguments.json:
            print(json.dumps([asdict(sample) for sample in samples]))
    return 0


def _print(samples: Sequence[JobSample], console: Console) -> None:
    """Print a table of ``samples`` with the columns :data:`SHOWN`."""
    shown = [HEADER.index(name) for name in SHOWN]
    table = Table(*SHOWN)
    for row in rows_of(samples):
        table.add_row(*(row[place] for place in shown))
    console.print(table)


def _schedules(arguments: argparse.Namespace) -> list[KillSchedule]:
    """Return the schedules of the benchmark.

    The first schedule has no kills. Random schedules follow, in the order of the values of ``--mtbf``. If
    ``--trace`` is given, the last schedule has the times of this trace, shifted so that the first kill comes after one
    mean time between kills.
    """
    schedules, until_s = [KillSchedule(NEVER, None, 0, ())], 100.0 * arguments.iterations
    for mtbf_s in arguments.mtbf:
        model = FailureModel(mtbf_s, arguments.nproc)
        schedules += [
            KillSchedule(f"{mtbf_s:g} s", mtbf_s, seed, model.draw(until_s, seed))
            for seed in range(arguments.seed, arguments.seed + arguments.repeats)
        ]
    if arguments.trace is not None:
        failures = recorded(arguments.trace, arguments.nproc, arguments.speedup)
        if len(failures) < 2:
            raise ConfigError(
                f"--trace {arguments.trace}: nodes leave at {len(failures)} different times; give a trace with at "
                "least 2 such times"
            )
        mtbf_s = mean_time_between(failures[1:], failures[-1].at_s - failures[0].at_s)
        name = f"{mtbf_s:.0f} s ({arguments.trace.stem} x {arguments.speedup:g})"
        shifted = [Failure(failure.at_s - failures[0].at_s + mtbf_s, failure.nodes) for failure in failures]
        schedules.append(KillSchedule(name, mtbf_s, 0, shifted))
    return schedules


def _samples(arguments: argparse.Namespace, schedules: Sequence[KillSchedule], console: Console) -> Iterator[JobSample]:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with tempfile.TemporaryDirectory() as folder, Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("", total=(1 + len(schedules) * len(arguments.strategies)) * arguments.iterations)
        done = 0

        def run(name: str, schedule: KillSchedule, run_dir: Path) -> KilledJob:
            nonlocal done

            def seen(newest: int) -> None:
                text = f"{name}, {schedule}: iteration {newest}"
                progress.update(task, description=text, completed=done + newest)

            job = _run(arguments, name, failures=schedule.failures, run_dir=run_dir, seen=seen)
            done += arguments.iterations
            return job

        free = run("none", schedules[0], Path(folder, FREE))
        yield sample_of(job=free, free=free, strategy=FREE, schedule=NEVER, mtbf_s=None, seed=0)
        for number, schedule in enumerate(schedules):
            for name in arguments.strategies:
                limited = schedule
                if name == "none":  # Without a limit on kills, this job would never end: each kill restarts it from 0.
                    few = [failure for failure in schedule.failures if failure.at_s <= 2 * free.training_s]
                    limited = KillSchedule(schedule.name, schedule.mtbf_s, schedule.seed, few)
                job = run(name, limited, Path(folder, f"{name}_{number}"))
                yield sample_of(
                    job, free, strategy=name, schedule=schedule.name, mtbf_s=schedule.mtbf_s, seed=schedule.seed
                )


def _run(
    arguments: argparse.Namespace, name: str, failures: Sequence[Failure], run_dir: Path, seen: Callable[[int], None]
) -> KilledJob:
    words = ["--nproc", str(arguments.nproc), "--spares", str(arguments.spares), str(SCRIPT)]
    words += training(arguments.config, arguments.iterations, name, run_dir.with_suffix(".windows"))
    return run_killed(words, run_dir, failures, seen)


def training(config: Path, iterations: int, strategy: str, windows: Path) -> list[str]:
    """Return the arguments of a training.

    Args:
        config: configuration file of the training.
        iterations: number of iterations to train.
        strategy: name from :data:`STRATEGIES`.
        windows: folder for windows of strategies that save to disk.
    """
    flags = [word.format(windows=windows) for word in STRATEGIES[strategy]]
    return ["--config", str(config), "--train-iters", str(iterations), *flags]
