"""Benchmark that looks for resources that grow in a job of hours with many kills. It writes benchmarks/long_run.md.

    python -m benchmarks.long_run --hours 2 --kills 200

The job trains small iterations on four ranks, two per node, with reorders, evaluations, dense saves and windows on
disk. The benchmark kills ranks and nodes. Every few seconds it counts memory, threads, descriptors and sockets of each
process, and files and bytes on disk. It fits a line to each figure. The exit code is 0 if the job ends well and no
figure grows.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.environment import measured_on
from benchmarks.papers.common import table
from moevement_cli.drill import PRESET
from moevement_core.run.run_record import RunRecord

OUTPUT, PLOT = Path(__file__).with_suffix(".md"), Path(__file__).with_suffix(".png")
PER_NODE = 2
WARM_UP = 0.3
"""Share of the run that is left out, because caches, arenas and logs of ended processes still grow then."""
GROWN_UP_S = 120
"""Age in seconds from which a rank is sampled. It has then built its model and passed its first windows."""
ROLE_CHANGE = 2.0
"""Factor by which the threads of a process grow when a spare becomes a rank."""
BLOCKS = 20
"""Number of parts of the run. A line is fitted to their means, because consecutive samples are not independent."""
GROWS_PER_HOUR = 0.02
"""Increase per hour, as a share of its mean, above which a figure may count as growing. See also :data:`ERRORS`."""
ERRORS = 4.0
"""Increase per hour, in standard errors of the slope, above which a figure may count as growing."""
BOUNDED = ("bytes, logs",)
"""Figures that the launcher bounds. They may grow in a run of a few hours, which does not reach the bounds."""
UNITS = {"memory": 1e6, "bytes": 1e6}
FLAGS = [
    "--eval-iters", "1", "--eval-interval", "50", "--moevement-reorder-threshold", "0",
    "--moevement-reorder-fraction", "0", "--save-interval", "100", "--save-retain-interval", "1000000000",
]  # fmt: skip
FOUND = """## What it has found

Earlier runs found these errors, which are fixed and tested:

- A job that had begun from a dense checkpoint could not recover (minute 10; `tests/functional/test_dense_checkpoints.py`).
- Each killed rank left a process of 360 MB, the server of a queue that Megatron's dense checkpoints start. After 37 minutes
  and 49 failures there were 117 processes instead of 9, and 24 GiB of memory were full (`launching/orphans.py`,
  `tests/functional/test_supervision.py`).
- The supervisor did not collect an ended process if an earlier process had had the same process id: two in two hours
  (`launching/supervisor.py`).
"""
MOST_PER_SECOND = 12
"""Upper limit of iterations per second. The data set must have samples for this rate."""
Sample = dict[str, Any]


def main() -> int:
    """Run the job, sample it, fit lines, write the page, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=2.0, metavar="H")
    parser.add_argument("--kills", type=int, default=200, metavar="N", help="kills of a rank or of a node")
    parser.add_argument("--every", type=float, default=5.0, metavar="S", help="seconds between samples (default: 5)")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep samples and the run directory here")
    parser.add_argument("--no-report", action="store_true", help="print the table, and write no page")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # SIGTERM must end the job as well
    with tempfile.TemporaryDirectory() as scratch:
        out = (arguments.out or Path(scratch)).absolute()
        out.mkdir(parents=True, exist_ok=True)
        run = play(arguments, out)
        text = report(arguments, run)
        print(text)
        if not arguments.no_report:
            OUTPUT.write_text(text, encoding="utf-8")
            draw(run.samples, PLOT)
    return 0 if run.code == 0 and run.is_whole and not any(line.grows for line in lines_of(run.samples)) else 1


@dataclass(frozen=True)
class Run:
    """Result of the long job."""

    samples: list[Sample]
    kills: int
    nodes: int
    code: int
    iterations: int
    is_whole: bool
    """True if each iteration has exactly one line in the metrics."""
    events: Counter[str]
    schedules: int
    """Number of schedules. A reorder makes a new one."""
    record_bytes: int


def play(arguments: argparse.Namespace, out: Path) -> Run:
    """Run the job from its start to its end, kill its processes at random moments, and return the result."""
    record = RunRecord(out / "run")
    length_s, draw = 3600 * arguments.hours, random.Random(arguments.seed)
    command = [
        sys.executable, "-m", "moevement_cli.main", "launch", "--nproc", "4", "--spares", "4", "--ranks-per-node",
        str(PER_NODE), *PRESET, *FLAGS, "--train-iters", str(int(MOST_PER_SECOND * length_s) + 200), "--moevement-sparse-ckpt", "--moevement-protection", "copies:1",
        "--moevement-persist-dir", str(out / "windows"), "--save", str(out / "dense"), "--run-dir", str(record.folder),
    ]  # fmt: skip
    with (out / "console").open("wb") as console:
        process = subprocess.Popen(command, stdout=console, stderr=console)
    samples: list[Sample] = []
    killed = nodes = 0
    try:
        while record.newest_metric() is None and process.poll() is None:
            time.sleep(0.1)
        began_s = time.monotonic()
        moments = sorted(draw.uniform(0.02, 0.97) * length_s for _ in range(arguments.kills))
        due_s = 0.0
        while process.poll() is None and (now_s := time.monotonic() - began_s) < length_s:
            if now_s >= due_s:
                due_s += arguments.every
                samples.append({"at_s": now_s, **sample(process.pid, out)})
                with (out / "samples.jsonl").open("a") as file:
                    file.write(json.dumps(samples[-1]) + "\n")
            while moments and now_s >= moments[0]:
                moments.pop(0)
                killed += 1
                nodes += strike(record, draw)
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)  # the job ends at the next boundary between iterations
        code = process.wait(300)
    finally:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
    numbers = [line["iteration"] for line in record.metrics()]
    events = Counter(event["event"] for event in record.events())
    schedules = {event["schedule"] for event in record.events() if event["event"] == "window"}
    size = sum(path.stat().st_size for path in (record.metrics_path, record.events_path))
    is_whole = numbers == list(range(1, numbers[-1] + 1))
    return Run(
        samples,
        kills=killed,
        nodes=nodes,
        code=code,
        iterations=numbers[-1],
        is_whole=is_whole,
        events=events,
        schedules=len(schedules),
        record_bytes=size,
    )


def strike(record: RunRecord, draw: random.Random) -> bool:
    """Kill a rank, or every process of a node, and return True if it was a node."""
    members = json.loads(record.ranks_path.read_text())
    active = [member for member in members if member["role"] == "active"]
    if not active:  # all ranks are dead, and no spare has taken over a rank yet
        return False
    chosen = draw.choice(active)
    is_node = draw.random() < 0.3
    for member in members if is_node else [chosen]:
        if member["node"] == chosen["node"]:
            with suppress(ProcessLookupError):
                os.kill(member["pid"], signal.SIGKILL)
    return is_node


def sample(launcher: int, out: Path) -> Sample:
    """Return the resources that the processes and folders of the job use at this moment."""
    processes = {}
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(launcher)
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                processes[f"{process.pid}@{process.create_time():.2f}"] = {
                    "is_launcher": process.pid == launcher, "age_s": time.time() - process.create_time(),
                    **_of_process(process),
                }  # fmt: skip
    return {"processes": processes, "folders": {name: _of_folder(path) for name, path in _folders(out)}}


def _of_process(process: psutil.Process) -> dict[str, float]:
    with process.oneshot():
        return {
            "memory": process.memory_info().rss, "threads": process.num_threads(), "descriptors": process.num_fds(),
            "sockets": len(process.net_connections("all")),
        }  # fmt: skip


def _folders(out: Path) -> Iterator[tuple[str, Path]]:
    yield "logs", out / "run" / "logs"
    yield "windows on disk", out / "windows"
    yield "dense checkpoints", out / "dense"
    yield "/dev/shm", Path("/dev/shm")


def _of_folder(folder: Path) -> dict[str, float]:
    sizes = []
    for where, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                sizes.append(os.lstat(Path(where, name)).st_size)
    return {"files": len(sizes), "bytes": sum(sizes)}


@dataclass(frozen=True)
class Line:
    """Line fitted to one figure over the run, without the warm-up."""

    name: str
    mean: float
    per_hour: float
    error: float
    """Standard error of the slope per hour."""

    @property
    def grows(self) -> bool:
        """True if the slope exceeds :data:`GROWS_PER_HOUR` of the mean and :data:`ERRORS` standard errors."""
        return (
            self.name not in BOUNDED
            and self.per_hour > GROWS_PER_HOUR * max(self.mean, 1e-9)
            and self.per_hour > ERRORS * self.error
        )


def lines_of(samples: Sequence[Sample]) -> list[Line]:
    """Return the fitted lines of all figures."""
    late = [sample for sample in samples if sample["at_s"] >= WARM_UP * samples[-1]["at_s"]]
    series: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for sample in late:
        members = list(sample["processes"].values())
        for what in ("memory", "threads", "descriptors", "sockets"):
            series[f"{what}, all processes"].append((sample["at_s"], sum(member[what] for member in members)))
            series[f"{what}, launcher"].append(
                (sample["at_s"], sum(member[what] for member in members if member["is_launcher"]))
            )
        series["processes"].append((sample["at_s"], len(members)))
        for name, counts in sample["folders"].items():
            for what, value in counts.items():
                series[f"{what}, {name}"].append((sample["at_s"], value))
    fitted = [fit(name, points) for name, points in series.items()]
    return fitted + [fit_by_age(what, late) for what in ("memory", "threads", "descriptors", "sockets")]


def fit(name: str, points: Sequence[tuple[float, float]]) -> Line:
    """Divide the run into :data:`BLOCKS` parts, and return a line through the means of the parts."""
    first, length = points[0][0], points[-1][0] - points[0][0] or 1.0
    blocks: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for at, value in points:
        blocks[min(int(BLOCKS * (at - first) / length), BLOCKS - 1)].append((at, value))
    means = [
        (statistics.fmean(at for at, _ in block), statistics.fmean(y for _, y in block)) for block in blocks.values()
    ]
    return _line(name, [means])


def fit_by_age(what: str, samples: Sequence[Sample]) -> Line:
    """Return the slope over time that all processes except the launcher have in common.

    Each process has its own level. A process gets a new level when it becomes a rank. The function sees this moment by
    a jump of the number of its threads.
    """
    lives: dict[str, list[tuple[float, float]]] = defaultdict(list)
    threads, changed = dict[str, float](), dict[str, float]()
    for sample in samples:
        for name, counts in sample["processes"].items():
            if not counts["is_launcher"]:
                if counts["threads"] > ROLE_CHANGE * threads.get(name, counts["threads"]):
                    changed[name] = sample["at_s"]
                threads[name] = counts["threads"]
                if counts["age_s"] > GROWN_UP_S and sample["at_s"] - changed.get(name, -GROWN_UP_S) >= GROWN_UP_S:
                    lives[f"{name} {changed.get(name)}"].append((sample["at_s"], counts[what]))
    return _line(f"{what}, of a rank with its age", [points for points in lives.values() if len(points) > 3])


def _line(name: str, groups: Sequence[Sequence[tuple[float, float]]]) -> Line:
    """Return the least-squares fit of one slope, with a level for each group."""
    centred = []
    for group in groups:
        at_mean, mean = statistics.fmean(at for at, _ in group), statistics.fmean(y for _, y in group)
        centred += [(at - at_mean, y - mean) for at, y in group]
    mean = statistics.fmean(y for group in groups for _, y in group) if groups else 0.0
    spread = sum(at * at for at, _ in centred)
    if not spread:
        return Line(name, mean, 0.0, 0.0)
    slope = sum(at * y for at, y in centred) / spread
    left = max(1, len(centred) - len(groups) - 1)
    error = (sum((y - slope * at) ** 2 for at, y in centred) / left / spread) ** 0.5
    return Line(name, mean, 3600 * slope, 3600 * error)


def report(arguments: argparse.Namespace, run: Run) -> str:
    """Return the text of the page."""
    fitted = lines_of(run.samples)
    rows = [
        [
            line.name + (" (MB)" if _unit(line.name) > 1 else ""), f"{line.mean / _unit(line.name):,.1f}",
            f"{line.per_hour / _unit(line.name):+,.2f} ± {line.error / _unit(line.name):,.2f}",
            "**growing**" if line.grows else "bounded" if line.name in BOUNDED else "flat",
        ]
        for line in fitted
    ]  # fmt: skip
    grows = [line.name for line in fitted if line.grows]
    hours = run.samples[-1]["at_s"] / 3600
    return f"""# A long run

    python -m benchmarks.long_run --hours {arguments.hours:g} --kills {arguments.kills} --seed {arguments.seed}

One job ran for {hours:.2f} h. It trained a quarter of the laptop model, PP2 x EP2, on four ranks in nodes of two, with spares.
It had {run.iterations} iterations and {run.kills} kills by SIGKILL at random moments, of which {run.nodes} hit all processes of a
node. It had {run.schedules} orders of operators, {run.events["evaluation"]} evaluations, {run.events["checkpoint"]} dense saves,
{run.events["failure"]} recoveries and {run.events["restart"]} restarts from disk or the beginning. Its exit code is
{run.code}, and {"each iteration has exactly one line" if run.is_whole else "ITERATIONS ARE MISSING OR TWICE THERE"} in `metrics.jsonl`.

**{"Nothing grows." if not grows else "Growing: " + ", ".join(grows) + "."}** A line is fitted to the means of {BLOCKS} parts of the run,
without its first {WARM_UP:.0%}. A figure is *growing* if the slope is more than {GROWS_PER_HOUR:.0%} of the mean per hour and more than {ERRORS:g}
standard errors. For figures of ranks there is also a fit with a level for each process, because a replacement begins anew.

{table(["", "mean", "change in an hour", ""], rows)}

The record of the run grows with the iterations, as it should: {run.record_bytes / max(run.iterations, 1):.0f} bytes for each
in `metrics.jsonl` and `events.jsonl`. Logs are bounded: a file has at most 64 MiB, with one older file beside it, and files of
the 64 processes that ended last are kept.

![what the job holds over time]({PLOT.name})

{FOUND}
{measured_on("torch", "megatron-core")}, gloo.
"""


def _unit(name: str) -> float:
    return UNITS.get(name.partition(",")[0], 1.0)


def draw(samples: Sequence[Sample], path: Path) -> None:
    """Draw the sums over all processes, and the files and bytes on disk, over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = {
        "resident memory, GB": lambda sample: sum(counts["memory"] for counts in sample["processes"].values()) / 1e9,
        "threads": lambda sample: sum(counts["threads"] for counts in sample["processes"].values()),
        "descriptors": lambda sample: sum(counts["descriptors"] for counts in sample["processes"].values()),
        "sockets": lambda sample: sum(counts["sockets"] for counts in sample["processes"].values()),
        "files on disk": lambda sample: sum(counts["files"] for counts in sample["folders"].values()),
        "MB on disk": lambda sample: sum(counts["bytes"] for counts in sample["folders"].values()) / 1e6,
    }
    figure, axes = pyplot.subplots(2, 3, figsize=(11, 5.5), sharex=True)
    for panel, (name, of) in zip(axes.flat, panels.items(), strict=True):
        panel.plot([sample["at_s"] / 60 for sample in samples], [of(sample) for sample in samples], linewidth=0.8)
        panel.set_title(name, fontsize=10)
        panel.set_ylim(bottom=0)
    for panel in axes[1]:
        panel.set_xlabel("minutes")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
