"""Comparison of simulated with measured jobs whose ranks are killed. It writes benchmarks/predicted.md.

    python -m benchmarks.predicted --folder runs/predicted        (ten minutes; jobs in the folder are used again)

1. ``moevement profile`` measures the parts of an iteration of the laptop preset.
2. One job with random kills measures the constants of this machine: noticing, regrouping, fetching, entering the loop.
3. Other jobs are simulated with the results of 1 and 2, and with the failures that each job had. The measured speed of
   these jobs is not used.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.environment import measured_on
from moevement_cli.simulate import SCENARIOS
from moevement_core.planning.profile import Profile
from moevement_core.run.run_record import RunRecord
from moevement_core.simulator.costs import MoEvementCost
from moevement_core.simulator.failures import Failure
from moevement_core.simulator.scenario import Scenario, load
from moevement_core.simulator.training import train

OUTPUT = Path(__file__).with_suffix(".md")
PROFILE = Path(__file__).with_name("laptop_profile.yaml")
ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "pretrain_moe" / "pretrain_gpt.py"
CONFIG = ROOT / "examples" / "pretrain_moe" / "configs" / "laptop.yaml"
CALIBRATION = (20.0, 11)
"""Mean seconds between failures, and the seed, of the job that measures the constants."""
JOBS = ((20.0, 21), (30.0, 12), (30.0, 13), (60.0, 14))
RANKS = 4


@dataclass(frozen=True)
class Compared:
    """Measured job with kills, and its simulation."""

    mtbf_s: float
    seed: int
    failures: int
    wall_s: float
    iterations: int
    iteration_s: float
    """Median seconds of an iteration that no failure disturbed."""
    lost_s: float
    """Measured seconds from failures to resumption, summed over all failures."""
    predicted_iterations: int
    predicted_lost_s: float

    @property
    def ettr(self) -> float:
        """Share of the time that was not lost to failures. Time by which other work slows iterations is not lost."""
        return 1 - self.lost_s / self.wall_s

    @property
    def predicted_ettr(self) -> float:
        """Share of the simulated time that was not lost to failures."""
        return 1 - self.predicted_lost_s / self.wall_s


def main() -> None:
    """Measure and simulate all jobs, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=200, help="of each job (default: 200)")
    parser.add_argument("--folder", type=Path, required=True, help="folder of the records of the jobs")
    arguments = parser.parse_args()
    folder = arguments.folder
    if not folder.exists():
        command("profile", "--nproc", str(RANKS), "--iterations", "60", "--output", str(PROFILE), *training())
    scenario = calibrated(load(SCENARIOS / "laptop.yaml"), job(folder, arguments.iterations, *CALIBRATION))
    rows = []
    for mtbf_s, seed in JOBS:
        rows.append(compared(job(folder, arguments.iterations, mtbf_s, seed), scenario, mtbf_s, seed))
        print(rows[-1], flush=True)
    OUTPUT.write_text(report(rows, scenario, Profile.load(PROFILE), arguments.iterations), encoding="utf-8")


def training() -> list[str]:
    """Return the training script and its configuration as arguments."""
    return [str(SCRIPT), "--config", str(CONFIG)]


def command(*words: str) -> None:
    """Run a ``moevement`` command, and raise an error if it fails."""
    subprocess.run([str(Path(sys.executable).with_name("moevement")), *words], check=True)


def job(folder: Path, iterations: int, mtbf_s: float, seed: int) -> RunRecord:
    """Return the record of a job with spares and kills. The function runs the job if the folder has no complete one."""
    record = RunRecord(folder / f"job_{seed}")
    if not record.summary_path.exists():
        kills = ["--moevement-inject-mtbf", str(mtbf_s), "--moevement-inject-seed", str(seed)]
        words = [*training(), "--train-iters", str(iterations), *kills, "--run-dir", str(record.folder)]
        command("launch", "--nproc", str(RANKS), "--spares", "2", *words)
    return record


def failures_of(run: RunRecord) -> list[dict[str, Any]]:
    """Return the failure events of a run. Each event describes one recovery."""
    return [event for event in run.events() if event["event"] == "failure"]


def calibrated(scenario: Scenario, run: RunRecord) -> Scenario:
    """Return the scenario with the seconds that parts of recoveries took in one job.

    The simulator predicts the replayed iterations. A replay takes more time than its iterations, for fetching, loading
    and the first pass of a new process. The function adds this time to the regrouping, as a constant of the machine.
    """
    failures = failures_of(run)
    each_s = scenario.time.segment_s([0])
    beyond_s = statistics.median(
        failure["parts"]["replay"] - each_s * max(failure["recovery"]["replayed_by_stage"].values())
        for failure in failures
    )

    def median(*parts: str) -> float:
        return statistics.median(sum(failure["parts"][part] for part in parts) for failure in failures)

    saved = replace(
        scenario.checkpointing,
        detect_s=median("detect", "abort"),
        regroup_s=median("regroup", "set up and fetch", "enter the loop") + max(0.0, beyond_s),
    )
    return replace(scenario, checkpointing=saved)


def compared(run: RunRecord, scenario: Scenario, mtbf_s: float, seed: int) -> Compared:
    """Return a measured job and its simulation, from the first iteration to the last."""
    metrics = list(run.metrics())
    began, ended = metrics[0]["time"] - (metrics[0]["iteration_s"] or 0.0), metrics[-1]["time"]
    # Leave out kills during the shutdown of the job, when no iteration can be lost.
    accounts = [failure for failure in failures_of(run) if failure["failed_at"] < ended]
    ends = [(failure["failed_at"], failure["resumed_at"]) for failure in accounts]
    calm = [
        line["iteration_s"]
        for line in metrics[5:]
        # An iteration that a recovery replayed has no duration.
        if line["iteration_s"] and not any(failed <= line["time"] <= resumed + 2.0 for failed, resumed in ends)
    ]
    failures = list(failures_in(accounts, metrics, began))
    strategy = MoEvementCost(scenario.costs())
    prediction = train(strategy, failures, ended - began)
    parts = ("detect", "regroup", "fetch", "convert", "catch up", "interrupted")
    # The simulator counts the interrupted iteration as lost, so the measured loss begins at the newest commit.
    lost_s = sum(resumed - failed for failed, resumed in ends) + sum(
        failed - max((line["time"] for line in metrics if line["time"] <= failed), default=failed) for failed, _ in ends
    )
    return Compared(
        mtbf_s, seed, failures=len(failures), wall_s=ended - began, iterations=len(metrics), iteration_s=statistics.median(calm), lost_s=lost_s,
        predicted_iterations=prediction.iterations,
        predicted_lost_s=sum(prediction.lost_s[part] for part in parts),
    )  # fmt: skip


def failures_in(
    recorded_failures: list[dict[str, Any]], metrics: list[dict[str, Any]], began: float
) -> Iterator[Failure]:
    """Yield the failures of a job. Each rank counts as a node.

    If a second failure interrupts a recovery, the record has one event for both, and a gap in the generation numbers.
    The function assumes that the failure without an event came half an iteration after the last commit, in the other
    stage. If several failures have no event, it spaces them evenly between that time and the failure with an event.
    """
    generation = 0
    for account in recorded_failures:
        ranks = [int(text.split()[1]) for text in account["failures"]]
        missing = account["generation"] - generation - 1
        last = max((line["time"] for line in metrics if line["time"] <= account["failed_at"]), default=began)
        first = last + statistics.median(line["iteration_s"] for line in metrics if line["iteration_s"]) / 2
        for number in range(missing):
            at = first + number * max(0.0, account["failed_at"] - first) / missing
            yield Failure(at - began, ((ranks[0] + RANKS // 2) % RANKS,))
        generation = account["generation"]
        yield Failure(account["failed_at"] - began, tuple(ranks))


def report(rows: list[Compared], scenario: Scenario, profile: Profile, iterations: int) -> str:
    """Return the text of the page."""
    table = "\n".join(
        f"| {row.mtbf_s:g} s | {row.seed} | {row.failures} | {row.wall_s:.0f} s | {row.iteration_s:.3f} s | "
        f"{row.lost_s / max(1, row.failures):.2f} s | {row.predicted_lost_s / max(1, row.failures):.2f} s | "
        f"{row.ettr:.3f} | {row.predicted_ettr:.3f} | {row.predicted_ettr - row.ettr:+.3f} |"
        for row in rows
    )
    differences = [abs(row.predicted_ettr - row.ettr) for row in rows]
    worst, mean = max(differences), statistics.mean(differences)
    saved = scenario.checkpointing
    slowest = statistics.median(row.iteration_s for row in rows) / profile.sizes[0].iteration_s
    return f"""# Predicted against measured

    python -m benchmarks.predicted --folder runs/predicted        (writes this file and benchmarks/laptop_profile.yaml)

The laptop preset on four ranks (pipeline 2, expert 2) with two spares, {iterations} iterations a job. SIGKILL ends ranks at random
times (`--moevement-inject-mtbf`). The prediction uses the profile, {saved.detect_s:.2f} s to notice and abort,
{saved.regroup_s:.2f} s to regroup, set up, enter the loop and begin a replay (medians of the kills of another job), and the failures of
the job. The schedule and the rollback are those of the policy. An iteration takes {profile.sizes[0].iteration_s:.3f} s in the
profile. ETTR is the share of the time that is not lost. Lost time is the time from each failure to the resumption, and the
interrupted iteration. Iterations that other work on the machine slows do not count as lost.

| MTBF | seed | failures | wall | iteration, median | lost to a failure, measured | predicted | ETTR, measured | predicted | off by |
|---|---|---|---|---|---|---|---|---|---|
{table}

The mean absolute difference is {mean:.3f}, and the largest difference is {worst:.3f}. The constants are those of one
lost stage. After a failure during a recovery both are restored: two processes set up, and two stages load and replay, on two
cores at the same time. In addition, the record does not say when exactly a failure came if its recovery was interrupted.

**Not predicted**: with snapshots, copies for peers and spares, an iteration of these jobs takes {slowest:.0%} of the time in the profile,
because four ranks already use both cores. A user would measure this share (`moevement bench overhead`) and give it as
`interference`. Both ETTRs leave it out here.

{measured_on("torch", "megatron-core")}.
"""


if __name__ == "__main__":
    main()
