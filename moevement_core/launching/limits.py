"""Check of the limits on processes and threads of this host, before a job hangs because it cannot start one."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import psutil

from moevement_core.errors import ConfigError

OF_A_RANK = 48
"""Threads that every rank needs to train. A rank of a small gloo job has some 90, most of them for its groups."""
OF_A_LAUNCHER = 16
"""Threads that a launcher needs."""


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
                f"{name} is {limit}, of which {used} are taken; {processes} processes need some {needed} threads: "
                "raise it, or start fewer"
            )


def _limits(cgroups: Path) -> Iterator[tuple[str, int, int]]:
    """Yield name, limit and current use of each limit on threads that holds for this process."""
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
