"""Campaign of jobs with random settings. It kills their ranks and nodes at random moments.

    python -m tests.soak.campaign --out runs/campaign               # goes on from where it stopped, however it stopped
    python -m tests.soak.campaign --out runs/campaign --report      # writes its table into benchmarks/soak.md

The campaign ends after 10,000 killed ranks and 1,000 lost nodes. Every job must end with the bits of a failure-free
one. At the first job with other bits the campaign ends with exit code 1. The run directory of that job stays.
``OUT/jobs.jsonl`` has a line for each job that is over. A report also copies this file to ``benchmarks/soak.jsonl``,
from which a campaign in a new folder goes on.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moevement_core.run.run_record import RunRecord
from tests.soak.__main__ import ROOT, digest, kind, run
from tests.soak.cells import WITH_WINDOWS, Cell, draw_cell

KILLS, NODES = 10_000, 1_000
LOOK_S = 0.02
BEGIN, END = "<!-- campaign -->\n", "<!-- end of campaign -->\n"
REPORT = ROOT / "benchmarks" / "soak.md"
RECORD = REPORT.with_suffix(".jsonl")


@dataclass(frozen=True)
class Plan:
    """Limits of a job of the campaign: iterations, kills and time."""

    iterations: int
    kills: int
    """Largest number of killed ranks."""
    mean_s: float
    """Mean time between kills, in seconds."""
    timeout_s: float


def read(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of ``path``; cut off a line that was incomplete when the campaign was killed."""
    if not path.exists():
        return []
    whole, _, torn = path.read_bytes().rpartition(b"\n")
    if torn:
        os.truncate(path, len(whole) + 1 if whole else 0)
    return [json.loads(line) for line in whole.splitlines()]


def append(path: Path, fields: dict[str, Any]) -> None:
    """Append a line, and return when it is durable."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(fields) + "\n")
        file.flush()
        os.fsync(file.fileno())


def commit() -> str:
    """Return the commit of the code, followed by ``+`` if the code has changed since."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def failure_free(cell: Cell, plan: Plan, out: Path, code: str) -> str:
    """Return the digest of a failure-free run of a cell's trainer, which runs once for each commit."""
    known, name = out / "failure_free.jsonl", f"{cell.layout}, {cell.recipe}, {plan.iterations}, {code}"
    digests = {line["name"]: line["digest"] for line in read(known)}
    if name not in digests:
        run_dir = out / "failure_free"
        shutil.rmtree(run_dir, ignore_errors=True)
        run([*cell.trainer, *_length(plan)], [], run_dir).wait()
        if (result := digest(run_dir)) is None:
            raise SystemExit(f"{cell}: the run without kills failed; see {run_dir}.console")
        append(known, {"name": name, "digest": result})
        digests[name] = result
    return str(digests[name])


def _length(plan: Plan) -> list[str]:
    return ["--train-iters", str(plan.iterations), "--lr-decay-iters", "1000", "--eval-iters", "0"]


def job(cell: Cell, plan: Plan, run_dir: Path, draw: random.Random) -> dict[str, Any]:
    """Run a job of a cell and kill its ranks; return its results as fields of a line."""
    for left in run_dir.parent.glob(f"{run_dir.name}*"):  # files of an interrupted attempt
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    windows = str(run_dir.with_suffix(".windows"))
    on_disk = ["--moevement-persist-dir", windows] if cell.protection in WITH_WINDOWS else []
    began_s = time.monotonic()
    process = run([*cell.trainer, *_length(plan), *cell.guard, *on_disk], cell.options, run_dir)
    kills, nodes = [], []
    try:
        for killed, node in strike(process, RunRecord(run_dir), cell, plan, draw):
            kills += killed
            nodes += [node] if node is not None else []
    finally:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            if process.poll() is None:
                process.kill()
    record = RunRecord(run_dir)
    failures = [event for event in record.events() if event["event"] == "failure"]
    return {
        "kills": kills, "nodes": nodes, "rc": process.wait(), "digest": digest(run_dir),
        "seconds": round(time.monotonic() - began_s, 1), "recoveries": [kind(event) for event in failures],
        "restarts": sum(event["event"] == "restart" for event in record.events()),
    }  # fmt: skip


def strike(
    process: subprocess.Popen[bytes], record: RunRecord, cell: Cell, plan: Plan, draw: random.Random
) -> Iterator[tuple[list[int], str | None]]:
    """Kill ranks, or whole nodes, until the job is over; yield the killed ranks, and their node if it was lost."""
    done, next_s, deadline_s = 0, None, time.monotonic() + plan.timeout_s
    beyond = 0  # the iteration that is to be committed before the next kill
    while process.poll() is None and time.monotonic() < deadline_s:
        time.sleep(LOOK_S)
        if next_s is None:
            if record.newest_metric() is not None:
                next_s = time.monotonic() + draw.expovariate(1 / plan.mean_s)
            continue
        if done >= plan.kills or time.monotonic() < next_s:
            continue
        newest = record.newest_metric()
        if newest is None or newest["iteration"] < beyond:
            continue
        processes = json.loads(record.ranks_path.read_text())
        active = [entry for entry in processes if entry["role"] == "active"]
        if not active:  # all ranks are dead, and no spare has taken over yet
            continue
        node = None
        if cell.per_node > 1 and draw.random() < 0.4:
            node = draw.choice(sorted({entry["node"] for entry in active}))
            chosen = [entry for entry in processes if entry["node"] == node and entry["role"] != "starting"]
        else:
            chosen = draw.sample(active, min(2 if draw.random() < 0.15 else 1, len(active)))
        killed = [entry["rank"] for entry in chosen if _kill(entry["pid"]) and entry["role"] == "active"]
        done += len(killed)
        yield killed, node if killed else None
        next_s = time.monotonic() + draw.expovariate(1 / plan.mean_s)
        # A quarter of the kills come before the job has resumed. If there were more, jobs would rightly give up.
        beyond = 0 if draw.random() < 0.25 else newest["iteration"] + 1


def _kill(pid: int) -> bool:
    """Kill a process; return False if it had ended, as a killed rank may not have a replacement yet."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def counts(jobs: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Return the number of kills and the number of lost nodes."""
    return sum(len(line["kills"]) for line in jobs), sum(len(line["nodes"]) for line in jobs)


def progress(jobs: Sequence[dict[str, Any]]) -> str:
    """Return the progress of the campaign and its expected remaining time, in words."""
    kills, nodes = counts(jobs)
    hours = sum(line["seconds"] for line in jobs) / 3600
    left = max((KILLS - kills) / kills if kills else 0.0, (NODES - nodes) / nodes if nodes else 0.0, 0.0) * hours
    return (
        f"{kills} of {KILLS} kills, {nodes} of {NODES} nodes, in {len(jobs)} jobs and {hours:.1f} h; about "
        f"{left:.1f} h more at this rate"
    )


def go_on_from_record(out: Path) -> None:
    """Copy the reported jobs to a new folder, so that its campaign goes on from them."""
    if RECORD.exists() and not (out / "jobs.jsonl").exists():
        shutil.copyfile(RECORD, out / "jobs.jsonl")


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Lock a folder inside the ``with`` block, so that only one campaign uses it."""
    with (out / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SystemExit(f"--out {out}: a campaign runs there; let it, or give another folder") from None
        yield


def campaign(arguments: argparse.Namespace, out: Path) -> int:
    """Run job after job until enough was killed; return 1 as soon as a job is lost or ends with other bits."""
    log, jobs = out / "jobs.jsonl", read(out / "jobs.jsonl")
    plan = Plan(arguments.iterations, arguments.kills_per_job, arguments.mean_s, arguments.timeout)
    stop_s = time.monotonic() + 60 * arguments.minutes if arguments.minutes else float("inf")
    while time.monotonic() < stop_s and (counts(jobs)[0] < KILLS or counts(jobs)[1] < NODES):
        number, seed, code = len(jobs), f"{arguments.seed}/{len(jobs)}", commit()
        draw = random.Random(seed)
        cell = draw_cell(draw)
        wanted = failure_free(cell, plan, out, code)
        run_dir = out / f"job_{number}"
        row = job(cell, plan, run_dir, draw)
        outcome = "lost" if row["digest"] is None or row["rc"] else "equal" if row["digest"] == wanted else "different"
        jobs.append({"job": number, "seed": seed, "commit": code, **cell.as_dict(), **row, "outcome": outcome})
        append(log, jobs[-1])
        print(
            f"job {number} ({cell}): {len(row['kills'])} kills, {len(row['nodes'])} nodes, {outcome}; {progress(jobs)}",
            flush=True,
        )
        if outcome != "equal":
            last_lines = run_dir.with_suffix(".console").read_text(errors="replace").strip().splitlines()[-1:]
            print(f"job {number} is {outcome}; its run directory is kept: {run_dir}", *last_lines, sep="\n", flush=True)
            return 1
        for left in out.glob(f"{run_dir.name}*"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    return 0


ROWS: dict[str, Callable[[dict[str, Any]], str]] = {
    "layout": lambda line: line["layout"],
    "recovery": lambda line: line["recovery"],
    "recipe": lambda line: line["recipe"],
    "protection": lambda line: line["protection"],
    "nodes": lambda line: "nodes of two ranks" if line["per_node"] > 1 else "each rank a node",
}


def report(jobs: Sequence[dict[str, Any]]) -> str:
    """Return the campaign's section of benchmarks/soak.md."""
    from benchmarks.environment import measured_on

    lines = [
        "## Campaign\n",
        "    python -m tests.soak.campaign --out runs/campaign\n",
        f"{progress(jobs)}. Kills by SIGKILL from outside at random moments, also during recoveries, of single ranks, "
        "of two at once, and of all processes of a node.\n",
        "| | jobs | kills | nodes lost | recoveries | restarts from disk or the beginning | jobs lost | other bits |",
        "|---|---|---|---|---|---|---|---|",
        _row("**all**", jobs),
    ]
    for name, value_of in ROWS.items():
        groups = defaultdict(list)
        for line in jobs:
            groups[value_of(line)].append(line)
        lines += [_row(f"{name}: {value}", group) for value, group in sorted(groups.items())]
    seeds, commits = ({line[name].partition("/")[0] for line in jobs} for name in ("seed", "commit"))
    lines += [
        "",
        f"Seeds {', '.join(sorted(seeds))}, commits {', '.join(sorted(commits))} (+: with changes). "
        f"{measured_on('torch', 'megatron-core')}, gloo.\n",
    ]
    return "\n".join(lines)


def _row(name: str, jobs: Sequence[dict[str, Any]]) -> str:
    kills, nodes = counts(jobs)
    recoveries, restarts = sum(len(line["recoveries"]) for line in jobs), sum(line["restarts"] for line in jobs)
    lost, other = (sum(line["outcome"] == outcome for line in jobs) for outcome in ("lost", "different"))
    return f"| {name} | {len(jobs)} | {kills} | {nodes} | {recoveries} | {restarts} | {lost} | {other} |"


def put_in(page: str, section: str) -> str:
    """Return ``page`` with the section in place of the earlier one, or at its end."""
    before, begin, remainder = page.partition(BEGIN)
    after = remainder.partition(END)[2] if begin else ""
    return f"{before.rstrip()}\n\n{BEGIN}{section}{END}{after}"


def main() -> int:
    """Run the campaign or write its report; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.campaign", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="its state, and the run that fails")
    parser.add_argument("--report", action="store_true", help="write the table, and run nothing")
    parser.add_argument("--minutes", type=float, metavar="M", help="begin no job after so long (default: go on)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=120, help="of each job (default: 120)")
    parser.add_argument("--kills-per-job", type=int, default=20, help="at most (default: 20)")
    parser.add_argument("--mean-s", type=float, default=2.5, help="between kills (default: 2.5)")
    parser.add_argument("--timeout", type=float, default=600, metavar="S", help="of a job (default: 600)")
    arguments = parser.parse_args()
    out = arguments.out.absolute()
    if arguments.report:
        jobs = read(out / "jobs.jsonl")
        if not jobs:
            raise SystemExit(f"--out {arguments.out}: no job is over there yet; run the campaign first")
        shutil.copyfile(out / "jobs.jsonl", RECORD)
        REPORT.write_text(put_in(REPORT.read_text(encoding="utf-8"), report(jobs)), encoding="utf-8")
        print(progress(jobs))
        return 0
    out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the running job, too
    with alone(out):
        go_on_from_record(out)
        return campaign(arguments, out)


if __name__ == "__main__":
    sys.exit(main())
