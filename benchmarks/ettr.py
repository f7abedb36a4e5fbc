"""ETTR of every strategy under the same kills, on one host and over links of limited rate; writes ettr.md and ettr.png.

    python -m benchmarks.ettr --folder runs/ettr        (an hour and three quarters; goes on from what is in the folder)

1. ``moevement bench ettr``: several schedules of kills at two mean times, and a recorded one.
2. The same training on a cluster of namespaces, a rank on each of four nodes and two spare nodes, with every link limited
   to a rate (``tc tbf``). Needs root, slurm-wlm, munge and iproute2.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.environment import measured_on
from benchmarks.papers.common import table
from moevement_cli.bench_ettr import CONFIG, OTHERS, training
from moevement_cli.ettr_prediction import predicted
from moevement_cli.ettr_samples import FREE, HEADER, NEVER, Sample, rows_of, sample_of
from moevement_cli.killed_job import KilledJob, watch
from moevement_cli.simulate import SCENARIOS
from moevement_core.run_record import RunRecord
from moevement_core.simulator.failures import Failure, FailureModel
from moevement_core.simulator.scenario import load
from tests.cluster.cluster import SYSTEM_PATH, Cluster, why_not
from tests.cluster.training import SBATCH

OUTPUT = Path(__file__).with_suffix(".md")
PLOT = OUTPUT.with_suffix(".png")
ROOT = Path(__file__).parents[1]
SCENARIO = SCENARIOS / "laptop.yaml"
OVER_LINKS = ("moevement", "moevement-redo", "gemini", "checkfreq", "moc", "moetion")
RANKS, SPARES = 4, 2


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, required=True, help="where results stay, so that the page can be made again"
    )
    parser.add_argument("--mtbf", nargs="+", default=["10", "25"], metavar="S", help="mean seconds between kills")
    parser.add_argument("--iterations", type=int, default=60, metavar="N", help="of each job on one host")
    parser.add_argument("--link-iterations", type=int, default=120, metavar="N", help="of each job over limited links")
    parser.add_argument("--repeats", default="3", metavar="R", help="schedules of kills for each mean time")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="a recorded schedule, too")
    parser.add_argument("--speedup", default="30", metavar="X", help="of the trace (default: 30)")
    parser.add_argument("--links", type=float, nargs="*", default=[400.0, 100.0], metavar="MBIT", help="rates of links")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    words = ["bench", "ettr", "--mtbf", *given.mtbf, "--iterations", str(given.iterations), "--repeats", given.repeats]
    words += ["--scenario", str(SCENARIO.relative_to(ROOT))]
    words += ["--trace", str(given.trace), "--speedup", given.speedup] if given.trace else []
    limited = {rate: _kept(given.folder / f"links_{rate:g}.json", _over_links(rate, given)) for rate in given.links}
    here = _kept(given.folder / "here.json", _here(words, given.folder))
    if (drawn := given.folder / PLOT.name).exists():
        PLOT.write_bytes(drawn.read_bytes())
    OUTPUT.write_text(report(words, here, limited, given), encoding="utf-8")


def _kept(path: Path, samples: Iterator[Sample]) -> list[Sample]:
    """What is in a file, which is made if it is not there."""
    if not path.exists():
        path.write_text(json.dumps([asdict(one) for one in samples]), encoding="utf-8")
    return [Sample(**one) for one in json.loads(path.read_text(encoding="utf-8"))]


def _here(words: Sequence[str], folder: Path) -> Iterator[Sample]:
    command = [str(Path(sys.executable).with_name("moevement")), *words, "--json", "--plot", str(folder / PLOT.name)]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout
    yield from (Sample(**one) for one in json.loads(printed.splitlines()[-1]))


def _over_links(rate: float, given: argparse.Namespace) -> Iterator[Sample]:
    """Each strategy under one schedule, with every node's link limited to ``rate``."""
    if (reason := why_not()) is not None:
        sys.exit(f"no cluster here: {reason}")
    os.environ.setdefault("MOEVEMENT_CACHE", str(Path(tempfile.gettempdir()) / "moevement-cache"))
    os.environ.setdefault("MOEVEMENT_PLATFORM", "cpu")
    mtbf_s = float(given.mtbf[-1])
    failures = FailureModel(mtbf_s, RANKS).draw(100.0 * given.link_iterations, 1)
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory() as folder:
        free = None
        for name in ("none", *OVER_LINKS):
            print(f"{rate:g} Mbit/s: {name}", file=sys.stderr, flush=True)
            kills = failures if name != "none" else ()
            with Cluster(nodes=RANKS + SPARES) as cluster:
                for node in cluster.names:
                    cluster.slow_link(node, rate)
                job = _job(cluster, Path(folder, name), name, given.link_iterations, kills)
            if free is None:
                free = job
                samples.append(sample_of(job, free, FREE, NEVER, None, 0))
            else:
                samples.append(sample_of(job, free, name, f"{mtbf_s:g} s", mtbf_s, 1))
    scenario = load(SCENARIO)
    slow = replace(scenario.cluster, network_bytes_per_s=rate * 1e6 / 8)
    yield from predicted(replace(scenario, cluster=slow), samples)


def _job(cluster: Cluster, folder: Path, name: str, iterations: int, failures: Sequence[Failure]) -> KilledJob:
    """A rank on each node; the process of a rank is killed, and the node's supervisor starts a spare in its place."""
    folder.mkdir()
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{SYSTEM_PATH}", "RUN_DIR": str(folder / "run"), "NPROC": "1",
        "SPARES": str(SPARES), "GLOO_SOCKET_IFNAME": "eth0", "TMPDIR": str(cluster.local), "OMP_NUM_THREADS": "1",
        **{name: os.environ[name] for name in ("MOEVEMENT_CACHE", "MOEVEMENT_PLATFORM")},
    }  # fmt: skip
    words = [*training(CONFIG, iterations, name, folder / "windows"), *OTHERS]
    its = cluster.submit(
        SBATCH, words, environment, nodes=RANKS + SPARES, tasks_per_node=1, output=folder / "job.out", folder=ROOT
    )
    job = KilledJob(RunRecord(folder / "run"))
    looks = 0

    def is_over() -> bool:
        nonlocal looks
        looks += 1  # Slurm is asked now and then: each time is a process more on cores that are busy
        return job.record.summary_path.exists() or (looks % 100 == 0 and not its.is_there())

    def kill(process: dict[str, Any]) -> None:
        cluster.kill_process(process["host"], process["pid"])

    watch(job, is_over, kill, failures)
    if not job.record.summary_path.exists():
        sys.exit(f"{name}: the job did not come to its end\n{its.text()[-4000:]}")
    return job


def report(words: list[str], here: list[Sample], limited: dict[float, list[Sample]], given: argparse.Namespace) -> str:
    """The whole file."""
    over_links = "\n\n".join(
        f"### {rate:g} Mbit/s\n\n{table(HEADER, rows_of(samples))}" for rate, samples in limited.items()
    )
    return f"""# ETTR of each strategy under the same kills

    python -m benchmarks.ettr --folder runs/ettr        (writes this file; runs the next line, and jobs over limited links)
    moevement {" ".join(words)}

The laptop preset on four ranks (pipeline 2 x expert/data 2), {given.iterations} iterations ({given.link_iterations} over limited links), two
spares. Ranks are killed by SIGKILL at moments of the wall clock, every strategy by the same schedules; a recorded schedule
loses several ranks at once, too.

- *overhead*: how much longer an iteration takes than in a job that saves nothing, median over rounds; each round of
  strategies begins with such a job, as the machine's speed changes from one quarter of an hour to the next. It changes
  within a round, too: the overhead of `none`, which saves nothing, says by how much, and differences between strategies that
  are smaller than that mean nothing.
- *available*: the share of a job's time that failures left to it: its iterations, each counted once and as long as its own
  median, over the time that it took. *ETTR* is that, over 1 + overhead.
- *predicted*: the simulator's ETTR for the kills that each job had (`examples/simulate/laptop.yaml` with
  `benchmarks/laptop_profile.yaml`). The first strategy's jobs calibrate how long noticing and regrouping take and how much
  copies slow training down, in each table on its own; all else is predicted.
- *repeated* counts iterations that were run again in all jobs of the row; *notice*, *regroup* and *run again* are medians
  of what a failure took; ± is half of a 95% confidence interval over schedules (Student).

## On one host

{table(HEADER, rows_of(here))}

![ETTR over MTBF, iterations over time, losses](ettr.png)

## Over limited links

A rank on each of four nodes and two nodes of spares, network namespaces of one machine under Slurm; every node's link is
limited each way (`tc tbf`), and windows are as long as a strategy makes them for it (`--moevement-window auto`). Training
sends its activations and gradients over the same links. Windows on disk (checkfreq) do not pass them. One schedule each:
a job that is slowed down by its copies lives through more kills.

{over_links}

What this machine cannot show: all ranks share two cores, so copies and digests of any strategy slow training down, which a
data centre's copy engines and idle processors would not; and a disk that is not shared by hundreds of nodes is fast, so
checkpoints to it cost next to nothing. What it does show: how much work each strategy repeats, how long it takes to be
back, what it sends, and what its recoveries lose.

{measured_on("torch", "megatron-core")}, gloo.
"""


if __name__ == "__main__":
    main()
