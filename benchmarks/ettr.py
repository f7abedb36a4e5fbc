"""Benchmark of the overhead of saving and the ETTR of each strategy, over links of four rates.

    python -m benchmarks.ettr        (three hours; skips jobs whose results are in ettr.jsonl; writes ettr.md and .png)

All jobs train the laptop preset with one rank on each of four nodes, and two spare nodes. The nodes are network
namespaces of one machine under Slurm. ``tc tbf`` limits their links in both directions. The benchmark needs root,
slurm-wlm, munge and iproute2.

1. For each rate and strategy, a job without kills. It measures the overhead of saving by comparing its own iterations.
2. For each limited rate and each strategy of MoEvement, a job whose links become half as fast early on.
3. For each rate and strategy, jobs whose ranks are killed. The schedules of kills are the same for all strategies.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.environment import measured_on
from benchmarks.ettr_page import HALVED_AT, PLOT, Halved, Jobs, page
from benchmarks.ettr_results import FILE, Planned, Results
from moevement_cli.bench_ettr import CONFIG, OTHERS, training
from moevement_cli.ettr_prediction import OverLinks, predicted
from moevement_cli.ettr_samples import FREE, NEVER, JobSample, plot, sample_of
from moevement_cli.killed_job import KilledJob, watch
from moevement_cli.simulate import SCENARIOS
from moevement_core.overhead.fields import recorded_overhead
from moevement_core.run.run_record import RunRecord
from moevement_core.simulator.failures import Failure
from moevement_core.simulator.scenario import Scenario, load
from tests.cluster.cluster import SYSTEM_PATH, Cluster, why_not
from tests.cluster.training import SBATCH

OUTPUT = Path(__file__).with_suffix(".md")
ROOT = Path(__file__).parents[1]
SCENARIO = SCENARIOS / "laptop.yaml"
STRATEGIES = ("moevement", "moevement-redo", "moevement-auto", "dense", "gemini", "checkfreq", "moc", "moetion")
OURS = STRATEGIES[:3]
NO_LIMIT = 0.0
"""Rate that stands for links without a limit."""
RATES = (NO_LIMIT, 1000.0, 400.0, 100.0)
"""Rates of links in Mbit/s."""
RANKS, SPARES = 4, 2


@dataclass(frozen=True)
class Measuring:
    """Jobs that the command line selects."""

    iterations: int
    """Iterations of each job."""
    mtbf_s: float
    """Mean seconds between kills."""
    repeats: int
    """Number of schedules of kills."""
    rates: Sequence[float]
    strategies: Sequence[str]

    def planned(self) -> list[Planned]:
        """Return all jobs in their order. Jobs come first if the results of other jobs mean little without them."""
        kill_free = [self._job(rate, name) for rate in self.rates for name in (FREE, *self.strategies)]
        halved = [
            self._job(rate, name, is_halved=True)
            for rate in self.rates
            if rate != NO_LIMIT
            for name in self.strategies
            if name in OURS
        ]
        killed = [
            self._job(rate, name, schedule)
            for schedule in range(1, self.repeats + 1)
            for rate in self.rates
            for name in self.strategies
        ]
        return [*kill_free, *halved, *killed]

    def _job(self, rate: float, name: str, schedule: int = 0, *, is_halved: bool = False) -> Planned:
        return Planned(
            rate, strategy=name, schedule=schedule, is_halved=is_halved, iterations=self.iterations, mtbf_s=self.mtbf_s
        )


def main() -> None:
    """Run the jobs that have no result yet, and write the page from all results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=200, metavar="N", help="of each job (default: 200)")
    parser.add_argument(
        "--mtbf", type=float, default=25.0, metavar="S", help="mean seconds between kills (default: 25)"
    )
    parser.add_argument("--repeats", type=int, default=1, metavar="R", help="schedules of kills (default: 1)")
    parser.add_argument(
        "--links", type=float, nargs="*", default=list(RATES), metavar="MBIT",
        help="rates of links; 0: no limit (default: 0 1000 400 100)",
    )  # fmt: skip
    parser.add_argument("--strategies", nargs="*", choices=STRATEGIES, default=list(STRATEGIES), help="default: all")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), metavar="M",
        help="start no job after M minutes; 0 only writes the page from present results (default: no limit)",
    )  # fmt: skip
    arguments = parser.parse_args()
    measuring = Measuring(
        iterations=arguments.iterations,
        mtbf_s=arguments.mtbf,
        repeats=arguments.repeats,
        rates=arguments.links,
        strategies=arguments.strategies,
    )
    results, until = Results.read(FILE), time.monotonic() + 60 * arguments.minutes
    missing = [job for job in measuring.planned() if job not in results.by_job]
    if missing and arguments.minutes:
        _prepare()
        with tempfile.TemporaryDirectory() as folder:
            runs = Runs(Path(folder), measuring)
            for done, planned in enumerate(missing):
                if time.monotonic() >= until:
                    break
                print(f"{done} of {len(missing)}: {_words(planned)}", file=sys.stderr, flush=True)
                results.add(planned, runs.result(planned), measured_on("torch", "megatron-core"))
    write(measuring, results)


def write(measuring: Measuring, results: Results, output: Path = OUTPUT, plotted: Path = PLOT) -> None:
    """Write the page and its plot from the results so far."""
    planned = measuring.planned()
    of_rates = {rate: [job for job in planned if job.rate == rate] for rate in measuring.rates}
    links = {
        rate: OverLinks(_scenario(rate), measured)
        for rate, those in of_rates.items()
        if (measured := list(results.samples(those)))
    }
    samples = dict(zip(links, predicted(list(links.values())), strict=True))
    jobs = Jobs(
        iterations=measuring.iterations, mtbf_s=measuring.mtbf_s, schedules=measuring.repeats, samples=samples,
        halved={rate: list(results.halved(of_rates[rate])) for rate in samples},
        missing=[_words(job) for job in planned if job not in results.by_job],
    )  # fmt: skip
    if NO_LIMIT in samples:
        plot(samples[NO_LIMIT], plotted)
    machines = dict.fromkeys(results.measured[job] for job in planned if job in results.measured)
    output.write_text(page(jobs, "; ".join(machines)), encoding="utf-8")


def _prepare() -> None:
    if (reason := why_not()) is not None:
        sys.exit(f"no cluster can start here: {reason}")
    os.environ.setdefault("MOEVEMENT_CACHE", str(Path(tempfile.gettempdir()) / "moevement-cache"))
    os.environ.setdefault("MOEVEMENT_PLATFORM", "cpu")


def _words(planned: Planned) -> str:
    link = f"{planned.rate:g} Mbit/s" if planned.rate else "no limit"
    if planned.is_halved:
        return f"{planned.strategy} at {link}, halved"
    return f"{planned.strategy} at {link}, {f'kills {planned.schedule}' if planned.schedule else 'no kills'}"


def _scenario(rate: float) -> Scenario:
    scenario = load(SCENARIO)
    if rate == NO_LIMIT:
        return scenario
    return replace(scenario, cluster=replace(scenario.cluster, network_bytes_per_s=rate * 1e6 / 8))


@dataclass(frozen=True)
class Runs:
    """Runner of jobs, which starts a new cluster for each job."""

    folder: Path
    """Folder of run records. Records of jobs that save nothing stay, for the comparison of bits with other jobs."""
    measuring: Measuring
    free: dict[float, KilledJob] = field(default_factory=dict)
    """Job that saves nothing, by the rate of links."""

    def result(self, planned: Planned) -> JobSample | Halved:
        """Run a job, and return its result."""
        if planned.is_halved:
            return self._halved(planned)
        free = self._free(planned.rate)
        if planned.strategy == FREE:
            return sample_of(job=free, free=free, strategy=FREE, schedule=NEVER, mtbf_s=None, seed=0)
        job = self._run(planned, planned.strategy)
        if not planned.schedule:
            return sample_of(job, free, strategy=planned.strategy, schedule=NEVER, mtbf_s=None, seed=0)
        return sample_of(
            job,
            free,
            strategy=planned.strategy,
            schedule=f"{planned.mtbf_s:g} s",
            mtbf_s=planned.mtbf_s,
            seed=planned.schedule,
        )

    def _free(self, rate: float) -> KilledJob:
        """Return the job that saves nothing over links of one rate. The first call for a rate runs the job."""
        if rate not in self.free:
            planned = Planned(
                rate,
                strategy=FREE,
                schedule=0,
                is_halved=False,
                iterations=self.measuring.iterations,
                mtbf_s=self.measuring.mtbf_s,
            )
            self.free[rate] = self._run(planned, "none", self.folder / f"free_{rate:g}" / "run")
        return self.free[rate]

    def _halved(self, planned: Planned) -> Halved:
        """Run a job whose links become half as fast, and return its overhead before that and at its end."""

        def seen(cluster: Cluster) -> Callable[[int], None]:
            is_slower = False

            def look(iteration: int) -> None:
                nonlocal is_slower
                if iteration >= HALVED_AT and not is_slower:
                    is_slower = True
                    _limit(cluster, planned.rate / 2)

            return look

        lines = [
            (line["iteration"], line["window"], overhead)
            for line in self._run(planned, planned.strategy, seen=seen).record.metrics()
            if (overhead := recorded_overhead(line)) is not None
        ]
        earlier = [line for line in lines if line[0] < HALVED_AT]
        if not earlier or lines[-1][0] < HALVED_AT:
            sys.exit(
                f"{_words(planned)}: no overhead was measured before iteration {HALVED_AT}, or none after it; "
                "give more --iterations"
            )
        before, after = earlier[-1], lines[-1]
        return Halved(
            strategy=planned.strategy, interval=before[1], overhead=before[2].share, low=before[2].low, high=before[2].high,
            interval_after=after[1], overhead_after=after[2].share, low_after=after[2].low, high_after=after[2].high,
        )  # fmt: skip

    def _run(
        self,
        planned: Planned,
        name: str,
        run_dir: Path | None = None,
        seen: Callable[[Cluster], Callable[[int], None]] = lambda cluster: lambda iteration: None,
    ) -> KilledJob:
        """Run a job on a new cluster, and kill ranks by its schedule. Supervisors start spares for killed processes.

        Args:
            planned: settings of the job.
            name: name of the strategy.
            run_dir: run directory. None: a folder that the next job removes.
            seen: function that gets the cluster, and returns the callback for the newest iteration.
        """
        failures: Sequence[Failure] = ()
        if planned.schedule:
            failures = kills(planned.mtbf_s, until_s=100.0 * planned.iterations, seed=planned.schedule)
        run_dir = run_dir or self.folder / "running" / "run"
        shutil.rmtree(run_dir.parent, ignore_errors=True)
        run_dir.parent.mkdir()
        with _cluster(planned.rate) as cluster:
            return _job(
                cluster, run_dir, name=name, iterations=planned.iterations, failures=failures, seen=seen(cluster)
            )


def kills(mtbf_s: float, until_s: float, seed: int) -> list[Failure]:
    """Return kills of one rank each: one in each ``mtbf_s`` seconds, at a random moment of them.

    Jobs of a few minutes have few kills. With one in each span of time, all jobs have about the same number of them.

    Args:
        mtbf_s: mean seconds between kills.
        until_s: seconds of training that the kills cover.
        seed: seed of the random moments and ranks.
    """
    random = np.random.default_rng(seed)
    spans = math.ceil(until_s / mtbf_s)
    return [Failure(mtbf_s * (span + random.random()), (int(random.integers(RANKS)),)) for span in range(spans)]


@contextmanager
def _cluster(rate: float) -> Iterator[Cluster]:
    with Cluster(nodes=RANKS + SPARES) as cluster:
        if rate != NO_LIMIT:
            _limit(cluster, rate)
        yield cluster


def _limit(cluster: Cluster, rate: float) -> None:
    for node in cluster.names:
        cluster.slow_link(node, rate)


def _job(
    cluster: Cluster,
    run_dir: Path,
    name: str,
    iterations: int,
    failures: Sequence[Failure],
    seen: Callable[[int], None],
) -> KilledJob:
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{SYSTEM_PATH}", "RUN_DIR": str(run_dir), "NPROC": "1",
        "SPARES": str(SPARES), "GLOO_SOCKET_IFNAME": "eth0", "TMPDIR": str(cluster.local), "OMP_NUM_THREADS": "1",
        **{name: os.environ[name] for name in ("MOEVEMENT_CACHE", "MOEVEMENT_PLATFORM")},
    }  # fmt: skip
    words = [*training(CONFIG, iterations, name, run_dir.parent / "windows"), *OTHERS]
    submitted = cluster.submit(
        SBATCH,
        words,
        environment,
        nodes=RANKS + SPARES,
        tasks_per_node=1,
        output=run_dir.parent / "job.out",
        folder=ROOT,
    )
    job = KilledJob(RunRecord(run_dir))
    looks = 0

    def is_over() -> bool:
        nonlocal looks
        looks += 1  # Query Slurm rarely: each query starts a process on busy cores.
        return job.record.summary_path.exists() or (looks % 100 == 0 and not submitted.is_there())

    def kill(process: dict[str, Any]) -> None:
        cluster.kill_process(process["host"], process["pid"])

    watch(job, is_over, kill=kill, failures=failures, seen=seen)
    if not job.record.summary_path.exists():
        sys.exit(f"{name}: the job ended before the end of training; its output:\n{submitted.text()[-4000:]}")
    return job


if __name__ == "__main__":
    main()
