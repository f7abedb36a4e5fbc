"""Command ``moevement drain``, which moves ranks off a node or a process before anything fails."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moevement_cli.waiting import waiting
from moevement_core.errors import ConfigError
from moevement_core.monitoring.watched_run import WatchedRun
from moevement_core.rendezvous.drains import RANK
from moevement_core.run.drain_requests import LOOK_S, MOST_REASON, DrainRequest, DrainRequests
from moevement_core.util.words import counted

POLL_S = 0.2
SETTLED_S = 10.0
"""Seconds without a change after which a job with fewer ranks than before counts as formed again."""
HEARD_S = 4 * LOOK_S
"""Seconds within which the coordinator has read a request; until then, a spare of the node may still get a rank."""


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
        "target", metavar="TARGET", nargs="?",
        help=f"name of a node, or number of a rank, as in ranks.json; {RANK}N if a node has this number as name",
    )  # fmt: skip
    parser.add_argument("--reason", metavar="TEXT", default="asked by the user", help="reason for the log of the job")
    parser.add_argument("--cancel", action="store_true", help="take the request back; a node's processes become spares")
    parser.add_argument("--no-wait", action="store_true", help="do not wait until the ranks have moved")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write or remove a request, wait, and return the exit code.

    Raises:
        ConfigError: the folder is no run directory of a running job, or the job has no such node or rank.
    """
    requests, target = DrainRequests(arguments.run_dir), arguments.target
    if not arguments.run_dir.is_dir():
        raise ConfigError(f"{arguments.run_dir}: not a folder; give the run directory of a running job")
    if target is None:
        if arguments.cancel:
            raise ConfigError("--cancel: give the node or the rank whose drain is to be taken back")
        _list(requests)
        return 0
    if arguments.cancel:
        if target not in requests.standing() or not requests.remove(target):
            raise ConfigError(f"{target!a}: not drained in {arguments.run_dir}; the command without TARGET lists all")
        print(f"{target} is not drained any more")
        return 0
    reason = " ".join(arguments.reason.split())
    if not reason or len(reason) > MOST_REASON:
        raise ConfigError(f"--reason {arguments.reason[:MOST_REASON]!a}: needs 1 to {MOST_REASON} characters")
    job = _Job(arguments.run_dir)
    is_node, ranks = job.is_node(target), job.ranks_on(target)
    if not is_node and not ranks:
        raise ConfigError(
            f"{target!a}: the job has no such node or rank; its nodes: {job.nodes}; a job without --spares cannot be "
            "drained"
        )
    requests.add(target, DrainRequest(reason, None if is_node else next(pid for _, pid in ranks)))
    if arguments.no_wait:
        print(f"asked to drain {target}; moevement top {arguments.run_dir} shows when its ranks have moved")
        return 0
    with waiting(f"waiting until {counted(len(ranks), 'rank')} moved") as say:
        _wait(job, target, ranks, is_node=is_node, say=say)
    print(f"no rank is on node {target}" if is_node else f"{target} moved to another process")
    return 0


def _wait(job: _Job, target: str, ranks: set[tuple[str, int]], *, is_node: bool, say: Callable[[str], None]) -> None:
    """Wait until no rank is where TARGET was, and all ranks have a process again.

    Raises:
        ConfigError: the job has ended before.
    """
    world, asked_at = len(job.ranks), time.monotonic()
    seen, changed_at = job.ranks, asked_at
    while True:
        now, left = time.monotonic(), job.ranks_on(target) if is_node else ranks & job.ranks_on(target)
        if job.ranks != seen:
            seen, changed_at = job.ranks, now
        # An elastic job may go on with fewer ranks.
        is_formed = len(seen) >= world or now - changed_at > SETTLED_S
        if not left and is_formed and (not is_node or now - asked_at > HEARD_S):
            return
        say(f"waiting until {counted(len(left), 'rank')} moved")
        if job.has_ended:
            raise ConfigError("the job has ended before its ranks moved")
        time.sleep(POLL_S)


def _list(requests: DrainRequests) -> None:
    standing = requests.standing()
    for target, request in standing.items():
        print(f"{target}: {request.reason}")
    if not standing:
        print("nothing is drained")


class _Job:
    """Running job, as its run directory shows it."""

    def __init__(self, run_dir: Path) -> None:
        self._run = WatchedRun(run_dir)
        if self.has_ended:
            raise ConfigError(f"{run_dir}: no job runs here; give the run directory of a running job")

    @property
    def has_ended(self) -> bool:
        self._run.update()
        return self._run.job is None or self._run.has_ended

    @property
    def ranks(self) -> set[tuple[str, int]]:
        """Node and process id of each process with a rank, as last read."""
        return {(_node_of(entry), entry["pid"]) for entry in self._run.processes if entry["role"] == "active"}

    @property
    def nodes(self) -> str:
        """Names of the nodes, for a message."""
        return ", ".join(sorted({_node_of(entry) for entry in self._run.processes})) or "none yet"

    def is_node(self, target: str) -> bool:
        """Return True if a process of the job is on a node with this name."""
        return any(_node_of(entry) == target for entry in self._run.processes)

    def ranks_on(self, target: str) -> set[tuple[str, int]]:
        """Return node and process id of each process with a rank that TARGET means."""
        self._run.update()
        ranks = [entry for entry in self._run.processes if entry["role"] == "active"]
        if self.is_node(target):
            ranks = [entry for entry in ranks if _node_of(entry) == target]
        else:
            ranks = [entry for entry in ranks if str(entry["rank"]) == target.removeprefix(RANK)]
        return {(_node_of(entry), entry["pid"]) for entry in ranks}


def _node_of(entry: dict[str, Any]) -> str:
    return str(entry.get("node", entry["host"]))
