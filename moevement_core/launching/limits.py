"""Check of this host's limits on threads and open files at the start, because a job that reaches a limit may hang."""

from __future__ import annotations

import math
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from moevement_core.errors import ConfigError

OF_A_RANK = 48
"""Lower estimate of the threads of a rank, so that the check refuses only jobs that certainly reach a limit.

A rank of a small gloo job has about 90 threads, most of them for process groups.
"""
OF_A_LAUNCHER = 16
"""Threads that a launcher needs."""
CONNECTIONS_TO_A_LAUNCHER = 3
"""Connections of each rank and spare to the launcher on its host: of its main thread, of the thread that watches it,
and a short one."""
CONNECTIONS_TO_A_STORE = 2
"""Connections of each rank to the store of process groups, in this generation and, until it has left, in the last."""
FILES_FOR_A_PEER = 16
"""Estimate of the open files of a rank for its connections to one other rank.

Jobs of 2 to 8 ranks over gloo had 9 to 10 open files for each other rank.
"""
OTHER_FILES = 256
"""Estimate of the open files of a rank that do not connect to other ranks: libraries, data, logs, devices."""


def check_process_limits(processes: int, cgroups: Path = Path("/sys/fs/cgroup")) -> None:
    """Refuse a number of ranks that the limits of this host do not allow.

    Args:
        processes: number of ranks and spares.
        cgroups: folder where control groups are mounted.

    Raises:
        ConfigError: a limit is too low. The message names the limit and the number of threads needed.
    """
    needed = OF_A_LAUNCHER + processes * OF_A_RANK
    for name, limit, used in _limits(cgroups):
        if limit - used < needed:
            raise ConfigError(
                f"{name} is {limit}, and {used} threads are in use; {processes} processes need about {needed} more; "
                "raise the limit, or start fewer processes"
            )


def allow_open_files(ranks: int, connections: int = 0) -> None:
    """Raise the soft limit on open files to what the job needs, for this process and its later children.

    Linux lets every process raise its soft limit up to the hard limit. On most hosts, the soft limit is 1,024 files.
    A launcher needs more in a job of about 340 ranks, and a rank over gloo in a job of about 100.

    If the hard limit is below the estimate for a rank, the function only warns, because a job with few process groups
    needs fewer files than the estimate. A process with connections prints the need when it raises the limit; a large
    job has many supervisors, which do not.

    Args:
        ranks: number of ranks of the job, each of which connects to all others; 0 if this process starts no ranks.
        connections: number of connections of other processes to this process or to a child of it.

    Raises:
        ConfigError: the hard limit is too low for these connections.
    """
    soft, hard = (math.inf if limit == resource.RLIM_INFINITY else limit for limit in _open_files())
    if hard < connections:
        raise ConfigError(
            f"the hard limit of open files (ulimit -Hn) is {hard}; the connections of the job's ranks and spares need "
            f"{connections} files; raise the limit, or start fewer processes"
        )
    # Twice the connections, because supervisors and later spares have connections as well.
    wanted = OTHER_FILES + max(FILES_FOR_A_PEER * ranks, 2 * connections)
    if hard < wanted:
        text = f"the hard limit of open files (ulimit -Hn) is {hard}; a process of this job may need about {wanted}"
        print(f"moevement: WARNING {text}", file=sys.stderr, flush=True)
    if soft < (allowed := min(wanted, hard)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(allowed), _open_files()[1]))
        if connections:
            text = f"a process of this job may have {wanted} open files; the limit is raised from {soft} to {allowed}"
            print(f"moevement: {text}", flush=True)


def _open_files() -> tuple[int, int]:
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def _limits(cgroups: Path) -> Iterator[tuple[str, int, int]]:
    """Yield each limit on threads that applies to this process: its name, its value, and the threads in use."""
    for folder in _groups(cgroups):
        try:
            limit, used = ((folder / name).read_text().strip() for name in ("pids.max", "pids.current"))
        except OSError:
            continue
        if limit.isdecimal() and used.isdecimal():
            yield f"pids.max of {folder}", int(limit), int(used)
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and os.geteuid() != 0:  # Root has no such limit.
        yield "the limit of processes of this user (ulimit -u)", soft, _threads_of_user()


def _groups(cgroups: Path) -> Iterator[Path]:
    """Yield the folders of this process's control group and its ancestors, for both versions of cgroups."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "pids" not in controllers.split(","):
            continue
        root = cgroups / "pids" if controllers else cgroups
        here = root / path.lstrip("/")
        yield from (group for group in (here, *here.parents) if group == root or root in group.parents)


def _threads_of_user() -> int:
    own = os.getuid()
    processes = psutil.process_iter(["uids", "num_threads"])
    return sum(
        process.info["num_threads"] or 1
        for process in processes
        if process.info["uids"] and process.info["uids"].real == own
    )
