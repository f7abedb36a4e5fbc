"""What saving costs and what failures leave of each strategy, over links of four rates; writes ettr.md and ettr.png.

    python -m benchmarks.ettr --folder runs/ettr        (three hours; goes on from what is in the folder)

All jobs train the laptop preset with a rank on each of four nodes and two spare nodes, network namespaces of one machine
under Slurm, whose links are limited each way (``tc tbf``). Needs root, slurm-wlm, munge and iproute2.

1. For each rate and strategy a job that nobody disturbs: what saving costs it, by its own comparison of iterations.
2. For each rate MoEvement's ways to recover while every link becomes half as fast early in the job.
3. For each rate and strategy jobs whose ranks are killed by the same schedules for all.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.environment import measured_on
from benchmarks.ettr_page import HALVED_AT, HALVED_TIMES, PLOT, Halved, Jobs, page
from moevement_cli.bench_ettr import CONFIG, OTHERS, training
from moevement_cli.ettr_prediction import predicted
from moevement_cli.ettr_samples import FREE, NEVER, Sample, plot, sample_of
from moevement_cli.killed_job import KilledJob, watch
from moevement_cli.simulate import SCENARIOS
from moevement_core.overhead.fields import recorded_overhead
from moevement_core.run_record import RunRecord
from moevement_core.simulator.failures import Failure, FailureModel
from moevement_core.simulator.scenario import load
from tests.cluster.cluster import SYSTEM_PATH, Cluster, why_not
from tests.cluster.training import SBATCH

OUTPUT = Path(__file__).with_suffix(".md")
ROOT = Path(__file__).parents[1]
SCENARIO = SCENARIOS / "laptop.yaml"
STRATEGIES = ("moevement", "moevement-redo", "moevement-auto", "dense", "gemini", "checkfreq", "moc", "moetion")
OURS = STRATEGIES[:3]
NO_LIMIT = 0.0
"""The rate of links that are not limited."""
RANKS, SPARES = 4, 2


@dataclass(frozen=True)
class Measuring:
    """The jobs that the command line asks for, and where their results stay."""

    folder: Path
    iterations: int
    """Of each job."""
    mtbf_s: float
    """Mean seconds between kills."""
    repeats: int
    """Schedules of kills."""

    def schedules(self) -> list[Sequence[Failure]]:
        """Return the kills of each schedule: ranks, and seconds after the first commit."""
        until_s = 100.0 * self.iterations
        return [FailureModel(self.mtbf_s, RANKS).draw(until_s, seed) for seed in range(1, self.repeats + 1)]


def main() -> None:
    """Run the jobs whose results are not in the folder yet, and write the page from all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where results stay; a job that is there is not run")
    parser.add_argument("--iterations", type=int, default=80, metavar="N", help="of each job (default: 80)")
    parser.add_argument(
        "--mtbf", type=float, default=25.0, metavar="S", help="mean seconds between kills (default: 25)"
    )
    parser.add_argument("--repeats", type=int, default=2, metavar="R", help="schedules of kills (default: 2)")
    parser.add_argument(
        "--links", type=float, nargs="*", default=[NO_LIMIT, 1000.0, 400.0, 100.0], metavar="MBIT",
        help="rates of links; 0: no limit (default: 0 1000 400 100)",
    )  # fmt: skip
    parser.add_argument("--strategies", nargs="*", choices=STRATEGIES, default=list(STRATEGIES), help="default: all")
    given = parser.parse_args()
    if (reason := why_not()) is not None:
        sys.exit(f"no cluster here: {reason}")
    os.environ.setdefault("MOEVEMENT_CACHE", str(Path(tempfile.gettempdir()) / "moevement-cache"))
    os.environ.setdefault("MOEVEMENT_PLATFORM", "cpu")
    given.folder.mkdir(parents=True, exist_ok=True)
    measuring = Measuring(given.folder, given.iterations, given.mtbf, given.repeats)
    jobs = Jobs(measuring.iterations, measuring.mtbf_s, {}, {})
    for rate in given.links:
        jobs.samples[rate] = list(_predicted(rate, _samples(rate, given.strategies, measuring)))
        jobs.halved[rate] = [_halved(rate, name, measuring) for name in OURS if rate and name in given.strategies]
    plot([one for its in list(jobs.samples.values())[:1] for one in its], PLOT)
    OUTPUT.write_text(page(jobs, measured_on("torch", "megatron-core")), encoding="utf-8")


def _samples(rate: float, strategies: Sequence[str], measuring: Measuring) -> list[Sample]:
    """Return what came of the jobs over links of one rate, the one that saves nothing first."""

    def free_job() -> KilledJob:
        """Return the job that saves nothing, which others have their bits compared with; its record stays."""
        record = RunRecord(measuring.folder / f"free_{rate:g}" / "run")
        return KilledJob(record) if record.summary_path.exists() else _run(rate, "none", (), measuring, record.folder)

    def sample(name: str, number: int) -> Sample:
        if name == FREE:
            shutil.rmtree(measuring.folder / f"free_{rate:g}", ignore_errors=True)
            job = free_job()
            return sample_of(job, job, FREE, NEVER, None, 0)
        if not number:
            return sample_of(_run(rate, name, (), measuring), free_job(), name, NEVER, None, 0)
        job = _run(rate, name, measuring.schedules()[number - 1], measuring)
        return sample_of(job, free_job(), name, f"{measuring.mtbf_s:g} s", measuring.mtbf_s, number)

    def kept(name: str, number: int) -> Sample:
        path = measuring.folder / f"{rate:g}_{name}_{number}.json"
        return Sample(**_kept(path, lambda: asdict(sample(name, number))))

    return [kept(FREE, 0), *(kept(name, number) for number in range(measuring.repeats + 1) for name in strategies)]


def _halved(rate: float, name: str, measuring: Measuring) -> Halved:
    """Return what saving costs a job whose links become half as fast early in it, before that and in the end."""

    def measure() -> dict[str, Any]:
        def seen(cluster: Cluster) -> Callable[[int], None]:
            is_slower = False

            def look(iteration: int) -> None:
                nonlocal is_slower
                if iteration >= HALVED_AT and not is_slower:
                    is_slower = True
                    _limit(cluster, rate / 2)

            return look

        longer = replace(measuring, iterations=HALVED_TIMES * measuring.iterations)
        lines = [
            (line["iteration"], line["window"], found)
            for line in _run(rate, name, (), longer, seen=seen).record.metrics()
            if (found := recorded_overhead(line)) is not None
        ]
        earlier = [line for line in lines if line[0] < HALVED_AT]
        if not earlier or lines[-1][0] < HALVED_AT:
            sys.exit(f"{name}: nothing is measured before iteration {HALVED_AT}, or after it; needs more iterations")
        before, after = earlier[-1], lines[-1]
        return asdict(
            Halved(
                name, before[1], before[2].share, before[2].low, before[2].high,
                after[1], after[2].share, after[2].low, after[2].high,
            )
        )  # fmt: skip

    return Halved(**_kept(measuring.folder / f"{rate:g}_{name}_halved.json", measure))


def _predicted(rate: float, samples: Sequence[Sample]) -> Iterator[Sample]:
    scenario = load(SCENARIO)
    if rate != NO_LIMIT:
        scenario = replace(scenario, cluster=replace(scenario.cluster, network_bytes_per_s=rate * 1e6 / 8))
    yield from predicted(scenario, samples)


def _kept(path: Path, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what is in a file, which is made if it is not there; whole or not at all."""
    if not path.exists():
        part = path.with_suffix(".part")
        part.write_text(json.dumps(measure()), encoding="utf-8")
        part.replace(path)
    return dict(json.loads(path.read_text(encoding="utf-8")))


@contextmanager
def _cluster(rate: float) -> Iterator[Cluster]:
    with Cluster(nodes=RANKS + SPARES) as cluster:
        if rate != NO_LIMIT:
            _limit(cluster, rate)
        yield cluster


def _limit(cluster: Cluster, rate: float) -> None:
    for node in cluster.names:
        cluster.slow_link(node, rate)


def _nothing(_: Cluster) -> Callable[[int], None]:
    return lambda iteration: None


def _run(
    rate: float,
    name: str,
    failures: Sequence[Failure],
    measuring: Measuring,
    run_dir: Path | None = None,
    seen: Callable[[Cluster], Callable[[int], None]] = _nothing,
) -> KilledJob:
    """Train on a cluster of its own; the process of a rank is killed, and its node's supervisor starts a spare.

    Args:
        rate: of every link, Mbit/s; :data:`NO_LIMIT`.
        name: of the strategy.
        failures: kills; none: nobody is.
        measuring: how long.
        run_dir: whose record is to stay; None: until the next job.
        seen: makes, of the cluster, what is called with the newest iteration now and then.
    """
    words = f"{name}, {'ranks are killed' if failures else 'nobody is killed'}"
    print(f"{f'{rate:g} Mbit/s' if rate else 'no limit'}: {words}", file=sys.stderr, flush=True)
    run_dir = run_dir or measuring.folder / "running" / "run"
    shutil.rmtree(run_dir.parent, ignore_errors=True)
    run_dir.parent.mkdir()
    with _cluster(rate) as cluster:
        return _job(cluster, run_dir, name, measuring.iterations, failures, seen(cluster))


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
    its = cluster.submit(
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
        looks += 1  # Slurm is asked now and then: each time is a process more on cores that are busy
        return job.record.summary_path.exists() or (looks % 100 == 0 and not its.is_there())

    def kill(process: dict[str, Any]) -> None:
        cluster.kill_process(process["host"], process["pid"])

    watch(job, is_over, kill, failures, seen)
    if not job.record.summary_path.exists():
        sys.exit(f"{name}: the job did not come to its end\n{its.text()[-4000:]}")
    return job


if __name__ == "__main__":
    main()
