"""Job of the benchmark: start it, take the time of its reports from outside, kill ranks, and end it."""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil

from benchmarks.peers.job import FOLDER_VARIABLE, ITERATIONS_VARIABLE, RANKS, SIZE_VARIABLE, SOCKET
from benchmarks.peers.systems import LOOPS, ROOT, System
from moevement_core.run.run_record import RunRecord

WARM_UP = 0.25
"""Share of the iterations of a job that no median counts, because connections and schedules settle then."""
LATEST_KILL = 0.2
"""Share of an iteration that has passed at the latest kill, so that the lost rank has sent no gradient of it."""
IN_FLIGHT = 0.5
"""Share of an iteration after a kill in which a commit is of an iteration that the lost rank had taken part in."""
JOB_LIMIT_S = 240.0
"""Seconds after which the benchmark ends a job and notes that it did not end by itself."""


_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class JobError(Exception):
    """A job ended badly, or not at all."""


@dataclass(frozen=True)
class Report:
    """Report of a rank, with the clock of the benchmark."""

    at_s: float
    rank: int
    pid: int
    iteration: int


@dataclass(frozen=True)
class Kill:
    """Kill of one rank, and what followed."""

    rank: int
    newest: int
    """Newest iteration that any rank had committed before the kill."""
    next_s: float
    """Seconds from the kill to the first commit of a later iteration, by any rank."""
    all_s: float
    """Seconds from the kill until all ranks, the replacement with them, have committed the same later iteration."""
    repeated: int
    """Number of committed iterations that ranks executed again."""


@dataclass
class Result:
    """Measurements of one job."""

    iteration_s: float
    """Seconds of an iteration: mean of the job without its warm-up; not meaningful with kills."""
    iteration_cpu_s: float
    """Processor seconds of all processes of the job per iteration, without the warm-up; not meaningful with kills."""
    rank_bytes: int
    """Host memory of a rank with its child processes, median of ranks; shared pages are divided among users (PSS)."""
    job_bytes: int
    """Host memory of all processes of the job (PSS)."""
    digest: str
    """SHA-256 of the final weights of rank 0."""
    kills: list[Kill] = field(default_factory=list)
    phases: list[dict[str, float]] = field(default_factory=list)
    """Seconds of each part of a recovery, as this project records them; empty for other systems."""

    def as_record(self) -> dict[str, Any]:
        """Return the measurements as plain data."""
        return asdict(self)


class Listener:
    """Socket on which the ranks of a job report, and the thread that notes the time of each report.

    Args:
        path: path of the socket, which the listener makes.
    """

    def __init__(self, path: Path) -> None:
        self.reports: list[Report] = []
        self.digests: dict[int, str] = {}
        self.changed = threading.Condition()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._thread = threading.Thread(target=self._listen, name="reports", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while message := self._socket.recv(4096):
            now_s, line = time.monotonic(), json.loads(message)
            with self.changed:
                if "digest" in line:
                    self.digests[line["rank"]] = line["digest"]
                else:
                    self.reports.append(Report(now_s, line["rank"], line["pid"], line["iteration"]))
                self.changed.notify_all()

    def close(self) -> None:
        """End the thread, and close the socket."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"", self._socket.getsockname())
        self._thread.join()
        self._socket.close()


class Job:
    """Job of one system. Leaving the context ends all its processes.

    Args:
        system: system of fault tolerance.
        peers: folder ``bin`` of the peers' environment.
        iterations: iterations that the job trains.
        size: name of the model's size.
    """

    def __init__(self, system: System, peers: Path, iterations: int, size: str) -> None:
        self.system, self.iterations = system, iterations
        self._peers, self._size = peers, size
        self._killed = set[int]()
        self._repeated = 0
        """Iterations that rank 0 has executed twice so far."""
        self._deadline_s = time.monotonic() + JOB_LIMIT_S

    def __enter__(self) -> Self:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._scratch = tempfile.TemporaryDirectory(prefix="peers-", ignore_cleanup_errors=True)
        self.folder = Path(self._scratch.name)
        self._console = (self.folder / "console").open("wb")
        self._listener = Listener(self.folder / SOCKET)
        variables = {
            **os.environ, FOLDER_VARIABLE: str(self.folder), ITERATIONS_VARIABLE: str(self.iterations),
            SIZE_VARIABLE: self._size, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        self._processes, self._services = list[subprocess.Popen[bytes]](), list[subprocess.Popen[bytes]]()
        for command in self.system.commands(self._peers, LOOPS / self.system.loop):
            process = subprocess.Popen(
                command.words, env={**variables, **command.variables}, stdout=self._console, stderr=self._console,
                stdin=subprocess.DEVNULL, cwd=self.folder, start_new_session=True,
            )  # fmt: skip
            (self._services if command.is_service else self._processes).append(process)
        return self

    def __exit__(self, *_: object) -> None:
        while everything := self._all():  # A supervisor may start a process in place of a killed one.
            for process in everything:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(everything, timeout=10)
        for started in (*self._processes, *self._services):
            started.wait()
        self._listener.close()
        self._console.close()
        self._scratch.cleanup()

    def _all(self) -> list[psutil.Process]:
        """Return all processes of the job. Orphans are among them, as this process is a subreaper."""
        return psutil.Process().children(recursive=True)

    @property
    def console(self) -> str:
        """Return the end of what the job has printed."""
        return (self.folder / "console").read_text(errors="replace")[-3000:]

    def wait(self, count: int, after: int = 0) -> list[Report]:
        """Wait until ``count`` ranks have reported an iteration later than ``after``, each the same; return all reports.

        Raises:
            JobError: the job ended before, or takes too long.
        """
        with self._listener.changed:
            while True:
                ranks: dict[int, set[int]] = {}
                for report in self._listener.reports:
                    if report.iteration > after:
                        ranks.setdefault(report.iteration, set()).add(report.rank)
                if any(len(reported) >= count for reported in ranks.values()):
                    return list(self._listener.reports)
                self._refuse_end()
                self._listener.changed.wait(0.5)

    def _refuse_end(self) -> None:
        codes = [process.poll() for process in self._processes]
        if all(code is not None for code in codes) or time.monotonic() > self._deadline_s:
            raise JobError(f"the job did not get further; exit codes {codes}; it printed\n{self.console}")

    def processor_s(self) -> float:
        """Return the processor time that all living processes of the job, and their ended children, have used."""
        total = 0.0
        for process in self._all():
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
        return total

    def memory(self) -> tuple[int, int]:
        """Return the memory of a rank and of the whole job, in bytes; see :class:`Result`."""
        newest = {report.rank: report.pid for report in self._listener.reports}
        of_ranks = []
        for pid in newest.values():
            with suppress(psutil.NoSuchProcess):  # A killed rank may not have come back.
                process = psutil.Process(pid)
                of_ranks.append(sum(map(_pss, (process, *process.children(recursive=True)))))
        return int(statistics.median(of_ranks)), sum(map(_pss, self._all()))

    def kill(self, rank: int, iteration: int, share: float) -> Kill:
        """Kill a rank when all ranks have committed ``iteration`` and a share of the next has passed.

        Returns:
            What followed. If survivors commit an iteration at once, the lost rank had done its part in it, and the time
            counts until the commit after that one.
        """
        length_s = self._length_s(self.wait(RANKS, iteration - 1))
        time.sleep(share * length_s)
        with self._listener.changed:
            before = list(self._listener.reports)
            pid = next(report.pid for report in reversed(before) if report.rank == rank)
            os.kill(pid, signal.SIGKILL)
            self._killed.add(pid)
            at_s = time.monotonic()
        newest = max(report.iteration for report in before)
        first_s = min(report.at_s for report in self.wait(1, newest) if report.iteration > newest)
        if first_s - at_s < IN_FLIGHT * length_s:
            newest += 1
        self.wait(1, newest)
        reports = self._wait_for_all(newest, pid)
        after = [report for report in reports if report.at_s > at_s]
        next_s = min(report.at_s for report in after if report.iteration > newest) - at_s
        numbers = [report.iteration for report in reports if report.rank == 0 and report.iteration <= newest]
        again = len(numbers) - len(set(numbers)) - self._repeated
        self._repeated += again
        return Kill(rank, newest, next_s=next_s, all_s=reports[-1].at_s - at_s, repeated=again)

    @staticmethod
    def _length_s(reports: Sequence[Report]) -> float:
        """Return the shortest seconds between two newest reports of a rank."""
        lengths = []
        for rank in range(RANKS):
            *_, earlier, later = [report.at_s for report in reports if report.rank == rank]
            lengths.append(later - earlier)
        return min(lengths)

    def _wait_for_all(self, newest: int, killed: int) -> list[Report]:
        """Wait until all ranks have reported the same later iteration, none of them from the killed process."""
        with self._listener.changed:
            while True:
                ranks: dict[int, set[int]] = {}
                for number, report in enumerate(self._listener.reports, start=1):
                    if report.iteration > newest and report.pid != killed:
                        ranks.setdefault(report.iteration, set()).add(report.rank)
                        if len(ranks[report.iteration]) == RANKS:
                            return self._listener.reports[:number]
                self._refuse_end()
                self._listener.changed.wait(0.5)

    def finish(self) -> str:
        """Wait for the end of the job, and return the digest of the final weights of rank 0.

        Raises:
            JobError: the job failed, or takes too long.
        """
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(1.0, self._deadline_s - time.monotonic()))
        codes = [process.poll() for process in self._processes if process.pid not in self._killed]
        digests = set(self._listener.digests.values())
        if any(codes) or None in codes or len(digests) != 1:
            raise JobError(f"exit codes {codes}, digests {self._listener.digests}; the job printed\n{self.console}")
        return digests.pop()

    def iteration_s(self) -> float:
        """Return the mean seconds of an iteration of rank 0, without the warm-up."""
        times = {report.iteration: report.at_s for report in self._listener.reports if report.rank == 0}
        first = max(1, int(WARM_UP * self.iterations))
        return (times[self.iterations] - times[first]) / (self.iterations - first)


def _pss(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0  # the process has ended


def run(system: System, peers: Path, iterations: int, size: str, kills: int = 0, seed: int = 1) -> Result:
    """Run one job, with kills of random ranks at equal distances, and return its measurements.

    Rank 0 is never killed, because one of the systems cannot lose it.

    Raises:
        JobError: the job failed.
    """
    draw, killed = random.Random(seed), list[Kill]()
    iterations *= system.longer if kills else 1
    with Job(system, peers, iterations, size) as job:
        for number in range(1, kills + 1):
            share = draw.uniform(0.0, LATEST_KILL)
            killed.append(job.kill(draw.randrange(1, RANKS), number * iterations // (kills + 1), share))
            print(f"  {killed[-1]}", file=sys.stderr, flush=True)
        first = max(1, int(WARM_UP * iterations)) if not kills else iterations - 4
        job.wait(RANKS, first - 1)
        before_s = job.processor_s()
        job.wait(RANKS, iterations - 2)
        used_s, memory = job.processor_s() - before_s, job.memory()
        digest = job.finish()
        failures = [event for event in RunRecord(job.folder / "run").events() if event["event"] == "failure"]
        phases = [event["parts"] | {"total": event["total_s"]} for event in failures]
        return Result(
            job.iteration_s(), used_s / (iterations - 1 - first), *memory, digest=digest, kills=killed, phases=phases
        )
