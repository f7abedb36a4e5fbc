"""Benchmark of the control of a job with thousands of ranks. It writes scale.md.

    python -m benchmarks.scale --members 64 256 1024 4096 [--json FILE]        (10 minutes)

The coordinator is the real process (``moevement coordinate``), and members exchange real messages with it over loopback.
They train nothing, and few processes hold them all (``scale_members.py``). Functions that plan over all ranks run alone,
up to 16,384 ranks (``scale_planners.py``).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.environment import measured_on
from benchmarks.papers.common import table
from benchmarks.scale_members import ON_NODE, Share, serve
from benchmarks.scale_planners import PLANNERS
from benchmarks.scale_vote import RANKS, VOTES, Vote, measure_vote
from moevement_core.comms.token import TOKEN_ENV, Token
from moevement_core.comms.tree import FAN_OUT
from moevement_core.launching.stand_by import stand_by

OUTPUT = Path(__file__).with_suffix(".md")
PROCESSES = 2
SPARES = ON_NODE
RECOVERIES = 3
QUESTIONS = 5
STEADY_S = 10.0
MOST_S = 180.0
"""Longest time in seconds that the benchmark waits for all members."""
LOOK_S = 0.02
PLANNED = (1024, 4096, 16_384)


@dataclass(frozen=True)
class Figures:
    """Figures of a job with one number of ranks."""

    ranks: int
    start_s: float
    """Seconds from the start of the first member to the entry of the last one into the first generation."""
    steady_cores: float
    """Processor time of the coordinator and its store over time, while nothing happens."""
    herd_s: float
    """Seconds from the loss of all connections of supervisors until the coordinator has answered each of them."""
    question_s: float
    """Seconds until the coordinator has answered a question of each rank, if all ask at once, median."""
    recovery_s: float
    """Seconds from the report of a death until the last member has entered the next generation, median."""
    recovery_bytes: int
    """Bytes over loopback in a recovery, median; each is counted once."""
    files: int
    memory_bytes: int
    """Open files, and resident memory, of the coordinator and its store; the largest."""
    takeover_s: float
    """Seconds from SIGKILL for the coordinator until its standby has answered all supervisors."""


def main() -> None:
    """Measure each number of ranks and the planners, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, nargs="+", default=[64, 256, 1024, 4096], metavar="N", help="ranks")
    parser.add_argument("--lease-seconds", type=float, default=10.0, metavar="S", help="lease time (default: 10)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE, and no page")
    arguments = parser.parse_args()
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    figures = []
    for ranks in arguments.members:
        figures.append(measure(ranks, arguments.lease_seconds))
        print(figures[-1], file=sys.stderr, flush=True)
    votes = [measure_vote(ranks) for ranks in RANKS]
    planners = {name: [_seconds(prepared, ranks) for ranks in PLANNED] for name, prepared in PLANNERS.items()}
    if arguments.json is not None:
        arguments.json.write_text(
            json.dumps(
                {"jobs": [asdict(job) for job in figures], "votes": list(map(asdict, votes)), "planners": planners},
                indent=1,
            )
        )
    else:
        OUTPUT.write_text(report(figures, votes, planners), encoding="utf-8")


def measure(ranks: int, lease_s: float) -> Figures:
    """Return the figures of a job with ``ranks`` ranks and one spare node."""
    token = Token.new()
    with tempfile.TemporaryDirectory() as folder, _coordinator(ranks, token, Path(folder)) as (process, address):
        with _job(Share(address, token.text, 0, ranks + SPARES, lease_s)) as job:
            start_s = job.wait_for_entry(0, ranks) - job.began_at
            job.connect_to_store()
            job.start_standby(token)
            cpu_s, since = _cpu_s(process), time.monotonic()
            time.sleep(STEADY_S)
            steady = (_cpu_s(process) - cpu_s) / (time.monotonic() - since)
            question_s = statistics.median(job.question() for _ in range(QUESTIONS))
            disconnected_at = job.disconnect()
            herd_s = job.wait_until_heard() - disconnected_at
            recoveries = [_recovery(job, ranks, number) for number in range(1, RECOVERIES + 1)]
            files, memory_bytes = process.num_fds(), process.memory_info().rss
            killed_at = time.monotonic()
            process.kill()
            return Figures(
                ranks=ranks,
                start_s=start_s,
                steady_cores=steady,
                herd_s=herd_s,
                question_s=question_s,
                recovery_s=statistics.median(seconds for seconds, _ in recoveries),
                recovery_bytes=int(statistics.median(nbytes for _, nbytes in recoveries)),
                files=files,
                memory_bytes=memory_bytes,
                takeover_s=job.wait_for_takeover() - killed_at,
            )


class _Job:
    """Processes with the supervisors and the members of a job.

    Args:
        processes: connection to each process.
        nodes: number of nodes.
    """

    def __init__(self, processes: Sequence[Any], nodes: int) -> None:
        self._processes, self._nodes = processes, nodes
        self._standby: Any = None
        """Process of the standby; None before there is one."""
        self.wait_until_heard()
        self.began_at = time.monotonic()
        """Monotonic time in seconds at which members began to join."""
        self._call("begin")

    def kill(self, member: int) -> float:
        """End a member, and report its death; return the monotonic time in seconds."""
        return float(max(self._call("kill", member)))

    def connect_to_store(self) -> None:
        """Give each member a client of the store of process groups."""
        self._call("connect_to_store")

    def start_standby(self, token: Token) -> None:
        """Start a standby when the coordinator asks a node for one, and wait until all nodes know it."""
        asked: list[Any] = []

        def is_asked() -> bool:
            asked[:] = [node for node in self._call("asked_for_standby") if node is not None]
            return bool(asked)

        self._wait(is_asked)
        number, coordinator, host = asked[0]
        context = multiprocessing.get_context("spawn")
        self._standby = context.Process(target=_stand_by, args=(coordinator, host, token), daemon=True)
        self._standby.start()
        self._call("has_standby", number)
        self._wait(lambda: sum(self._call("prepared")) == self._nodes)

    def wait_for_takeover(self) -> float:
        """Wait until the standby has answered all supervisors as the coordinator; return the monotonic time in s."""
        self._wait(lambda: sum(self._call("obeying", 2)) == self._nodes)
        return time.monotonic()

    def end(self) -> None:
        """End the standby, if there is one."""
        if self._standby is not None:
            self._standby.kill()
            self._standby.join()

    def question(self) -> float:
        """Return the seconds until a question of each rank is answered, if all ask at once."""
        times = self._call("question")
        return float(max(last for _, last in times) - min(first for first, _ in times))

    def disconnect(self) -> float:
        """Break the connections of all supervisors; return the monotonic time in seconds."""
        return float(min(self._call("disconnect")))

    def wait_until_heard(self) -> float:
        """Wait until the coordinator has answered all supervisors; return the monotonic time in seconds."""
        self._wait(lambda: sum(self._call("connected")) == self._nodes)
        return time.monotonic()

    def wait_for_entry(self, generation: int, ranks: int) -> float:
        """Wait until all ranks have entered a generation; return the monotonic time in seconds of the last entry."""
        self._wait(lambda: sum(count for count, _ in self._call("entered", generation)) == ranks)
        return float(max(at for _, at in self._call("entered", generation)))

    def _call(self, name: str, *arguments: Any) -> list[Any]:
        for process in self._processes:
            process.send((name, *arguments))
        return [process.recv() for process in self._processes]

    def _wait(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + MOST_S
        while not holds():
            if time.monotonic() > deadline:
                states = self._call("connected"), self._call("entered", 0)
                raise TimeoutError(f"members or supervisors were not ready within {MOST_S:g} s: {states}")
            time.sleep(LOOK_S)


def _recovery(job: _Job, ranks: int, generation: int) -> tuple[float, int]:
    """Kill a member, and return seconds and bytes until the next generation has all its ranks."""
    before = psutil.net_io_counters(pernic=True)["lo"].bytes_sent
    killed_at = job.kill(generation)
    entered_at = job.wait_for_entry(generation, ranks)
    nbytes = psutil.net_io_counters(pernic=True)["lo"].bytes_sent - before
    job.connect_to_store()
    return entered_at - killed_at, nbytes


def _stand_by(coordinator: tuple[str, int], host: str, token: Token) -> None:
    import torch  # noqa: F401 - a supervisor's fork has it in memory

    os.environ[TOKEN_ENV] = token.text
    stand_by(coordinator, host, token)


@contextmanager
def _coordinator(ranks: int, token: Token, folder: Path) -> Iterator[tuple[psutil.Process, tuple[str, int]]]:
    """Run the coordinator of a job, and yield its process and its address."""
    words = ["coordinate", "--ranks", str(ranks), "--run-dir", str(folder / "run")]
    output = folder / "coordinator.log"
    with output.open("w") as file, subprocess.Popen(
        [sys.executable, "-m", "moevement_cli.main", *words], env={**os.environ, TOKEN_ENV: token.text}, stdout=file,
        stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        try:
            while (address := re.search(r"MOEVEMENT_STORE=([\d.]+):(\d+)", output.read_text())) is None:
                if process.poll() is not None:
                    raise RuntimeError(f"the coordinator has ended before it had an address: {output.read_text()}")
                time.sleep(LOOK_S)
            yield psutil.Process(process.pid), (address[1], int(address[2]))
        except TimeoutError:
            print(output.read_text()[-2000:], file=sys.stderr)
            raise
        finally:
            process.kill()


@contextmanager
def _job(everything: Share) -> Iterator[_Job]:
    """Start the processes with supervisors and members, and end them after the ``with`` block.

    Supervisors are there first, as in a real job. Otherwise the leases of the first members could run out.
    """
    context = multiprocessing.get_context("spawn")
    nodes = -(-everything.last // ON_NODE)
    each = ON_NODE * -(-nodes // PROCESSES)
    processes: list[Any] = []
    connections: list[Any] = []
    job: _Job | None = None
    try:
        for first in range(0, everything.last, each):
            here, there = context.Pipe()
            share = replace(everything, first=first, last=min(first + each, everything.last))
            process = context.Process(target=serve, args=(share, there), daemon=True)
            process.start()
            processes.append(process)
            connections.append(here)
        job = _Job(connections, nodes)
        yield job
    finally:
        if job is not None:
            job.end()
        for process in processes:
            process.kill()
            process.join()


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _seconds(prepared: Callable[[int], Callable[[], object]], ranks: int) -> float:
    work, seconds = prepared(ranks), []
    for _ in range(3):
        began = time.process_time()
        work()
        seconds.append(time.process_time() - began)
    return min(seconds)


def report(figures: Sequence[Figures], votes: Sequence[Vote], planners: dict[str, list[float]]) -> str:
    """Return the text of the page."""
    header = [
        "ranks", "start, s", "steady load, cores", "herd, s", "question, ms", "recovery, s", "MB in a recovery", "takeover, s", "open files", "memory, MB",
    ]  # fmt: skip
    rows = [
        [
            f"{job.ranks:,}", f"{job.start_s:.1f}", f"{job.steady_cores:.2f}", f"{job.herd_s:.1f}",
            f"{1000 * job.question_s:.0f}", f"{job.recovery_s:.2f}", f"{job.recovery_bytes / 1e6:.1f}", f"{job.takeover_s:.1f}", f"{job.files:,}", f"{job.memory_bytes / 1e6:.0f}",
        ]
        for job in figures
    ]  # fmt: skip
    planned = [[name, *(f"{1000 * value:.1f}" for value in seconds)] for name, seconds in planners.items()]
    voted = [[f"{vote.ranks}", f"{1000 * vote.cpu_s:.2f}", f"{1000 * vote.seconds:.2f}"] for vote in votes]
    return f"""# The control of a job with thousands of ranks

    python -m benchmarks.scale --members {" ".join(str(job.ranks) for job in figures)}        (writes this file)

This page is for people who want to know at what size the coordinator becomes the limit. The coordinator is the real process, and
members run the code of real members, over one connection of each node ({ON_NODE} ranks) on loopback, on the same two cores. They train
nothing. In place of the Unix socket between a rank and its supervisor is a call, because on a cluster each node has processors for that.
A standby, on the same cores too, has a copy of all values ([docs/leases.md](../docs/leases.md#the-coordinator-may-be-lost)).

- *start*: from the first member's wish to join until the last has entered the first generation.
- *steady load*: processor time of the coordinator, with the store of process groups, while all supervisors renew leases.
- *question*: until the coordinator has answered the question of each rank if its generation is interrupted, median of {QUESTIONS}. All
  ranks ask at once, as they do before they begin to train; those of a node share a message.
- *herd*: all supervisors lose their connections at once; time until the coordinator has answered each of them.
- *recovery*: from the report that a rank was killed until all ranks have acknowledged the next roster and entered it, median of
  {RECOVERIES}. Each rank then makes a new client of the store of process groups, which is not included.
- *MB in a recovery*: bytes over loopback in this time, with those to the standby.
- *takeover*: the coordinator is killed; time until the standby has answered all supervisors as the next coordinator.
- *open files*, *memory*: of the coordinator, at the end.

{table(header, rows)}

## The vote of an iteration

Before each update, ranks vote over a tree, and one of them asks the coordinator ([docs/commit_point.md](../docs/commit_point.md)). Here
ranks are processes that only vote, {VOTES} times. At any number of ranks, a rank exchanges a message with at most {FAN_OUT + 1} others, so the
processor time of the second row is the most. All processes share two cores; on separate machines a vote takes twice the depth of the tree
in messages: 12 at 4,096 ranks.

{table(["ranks", "processor time of a rank, ms", "until a rank has the answer, ms"], voted)}

## Functions that plan over all ranks

Milliseconds of processor time of one call, the best of three.

{table(["function", *(f"{ranks:,} ranks" for ranks in PLANNED)], planned)}

{measured_on("torch")}
"""


if __name__ == "__main__":
    main()
