"""Command ``moevement drain``, which moves ranks off a node or a process before anything fails."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from moevement_cli.waiting import waiting
from moevement_core.errors import ConfigError
from moevement_core.monitoring.watched_run import WatchedRun
from moevement_core.run.drain_requests import DrainRequests
from moevement_core.util.words import counted

POLL_S = 0.2
MOST_REASON = 200
"""Largest number of characters of a reason, which is part of log lines."""


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the description and arguments of ``moevement drain``."""
    parser.description = (
        "Move ranks of a running job off a node, or one rank off its process. At the next boundary between "
        "iterations, each of these ranks hands its state to a peer and a spare takes the rank over, so no iteration is "
        "repeated. A drained node gets no rank until the request is taken back with --cancel. The command waits until "
        "the ranks have moved; Ctrl-C ends only the wait. Without TARGET it lists the requests."
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="run directory of the job (--run-dir)")
    parser.add_argument(
        "target", metavar="TARGET", nargs="?", help="the name of a node, or the number of a rank, as in ranks.json"
    )
    parser.add_argument("--reason", metavar="TEXT", default="asked by the user", help="reason for the log of the job")
    parser.add_argument("--cancel", action="store_true", help="take the request back; a node's processes become spares")
    parser.add_argument("--no-wait", action="store_true", help="do not wait until the ranks have moved")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write or remove a request, wait, and return the exit code.

    Raises:
        ConfigError: the folder is no run directory of a running job, or the job has no such node or rank.
    """
    requests = DrainRequests(arguments.run_dir)
    if arguments.target is None:
        if arguments.cancel:
            raise ConfigError("--cancel: give the node or the rank whose drain is to be taken back")
        _list(requests)
        return 0
    if arguments.cancel:
        if not requests.remove(arguments.target):
            raise ConfigError(
                f"{arguments.target}: not drained in {arguments.run_dir}; the command without TARGET lists all"
            )
        print(f"{arguments.target} is not drained any more")
        return 0
    reason = " ".join(arguments.reason.split())
    if not reason or len(reason) > MOST_REASON:
        raise ConfigError(f"--reason {arguments.reason[:MOST_REASON]!r}: needs 1 to {MOST_REASON} characters")
    job = _Job(arguments.run_dir)
    ranks = job.ranks_on(arguments.target)
    requests.add(arguments.target, reason)
    if arguments.no_wait:
        print(f"asked to drain {arguments.target}; moevement top {arguments.run_dir} shows when its ranks have moved")
        return 0
    with waiting(f"waiting until {counted(len(ranks), 'rank')} moved") as say:
        while left := ranks & job.ranks_on(arguments.target, may_be_gone=True):
            say(f"waiting until {counted(len(left), 'rank')} moved")
            if job.has_ended:
                raise ConfigError(f"{arguments.run_dir}: the job has ended before its ranks moved")
            time.sleep(POLL_S)
    print(f"{counted(len(ranks), 'rank')} moved off {arguments.target}")
    return 0


def _list(requests: DrainRequests) -> None:
    standing = requests.standing()
    for target, reason in standing.items():
        print(f"{target}: {reason}")
    if not standing:
        print("nothing is drained")


class _Job:
    """Running job, as its run directory shows it."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._run = run_dir, WatchedRun(run_dir)
        if not run_dir.is_dir():
            raise ConfigError(f"{run_dir}: not a folder; give the run directory of a running job")
        if self.has_ended:
            raise ConfigError(f"{run_dir}: no job runs here; give the run directory of a running job")

    @property
    def has_ended(self) -> bool:
        self._run.update()
        return self._run.job is None or self._run.has_ended

    def ranks_on(self, target: str, *, may_be_gone: bool = False) -> set[tuple[str, int]]:
        """Return node and process id of each process with a rank that TARGET means.

        Raises:
            ConfigError: the job has no such node or rank.
        """
        self._run.update()
        entries = [(entry.get("node", entry["host"]), entry) for entry in self._run.processes]
        ranks = {(node, entry["pid"]): str(entry["rank"]) for node, entry in entries if entry["role"] == "active"}
        nodes = {node for node, _ in entries}
        chosen = {process for process, rank in ranks.items() if target in (rank, *process[:1])}
        if not chosen and target not in nodes and not may_be_gone:
            known = ", ".join(sorted(nodes)) or "none yet"
            raise ConfigError(
                f"{target}: the job has no such node or rank; its nodes: {known}; a job without --spares "
                "cannot be drained"
            )
        return chosen
