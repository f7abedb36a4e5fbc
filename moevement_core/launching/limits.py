"""How many processes and threads a job may have here: said before it hangs for want of one."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import psutil

from moevement_core.errors import ConfigError

OF_A_RANK = 48
"""Threads without which no rank trains. One of a small job over gloo has some 90, most of them those of its groups."""
OF_A_LAUNCHER = 16


def check_process_limits(processes: int, cgroups: Path = Path("/sys/fs/cgroup")) -> None:
    """Raise if so many ranks cannot be started.

    Args:
        processes: ranks and spares.
        cgroups: where control groups are mounted.

    Raises:
        ConfigError: a limit is too low; the message says which, and how much is needed.
    """
    needed = OF_A_LAUNCHER + processes * OF_A_RANK
    for name, limit, used in _limits(cgroups):
        if limit - used < needed:
            raise ConfigError(
                f"{name} is {limit}, of which {used} are taken; {processes} processes need some {needed} threads: "
                "raise it, or start fewer"
            )


def _limits(cgroups: Path) -> Iterator[tuple[str, int, int]]:
    """Name, limit and use of each that holds for this process."""
    for folder in _groups(cgroups):
        try:
            limit, used = ((folder / name).read_text().strip() for name in ("pids.max", "pids.current"))
        except OSError:
            continue
        if limit.isdecimal() and used.isdecimal():
            yield f"pids.max of {folder}", int(limit), int(used)
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and os.geteuid() != 0:  # root has none
        yield "the limit of processes of this user (ulimit -u)", soft, _threads_of_user()


def _groups(cgroups: Path) -> Iterator[Path]:
    """This process's control group and all above it, of both versions."""
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
        yield from (one for one in (here, *here.parents) if one == root or root in one.parents)


def _threads_of_user() -> int:
    own = os.getuid()
    found = psutil.process_iter(["uids", "num_threads"])
    return sum(its.info["num_threads"] or 1 for its in found if its.info["uids"] and its.info["uids"].real == own)
