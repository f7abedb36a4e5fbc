"""What the launcher does while processes run, and when one of them ends."""

from __future__ import annotations

import os
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil

from megatron.moevement.children import Child, end_all
from moevement_core.cli.exit_codes import USAGE_ERROR
from moevement_core.cli.progress import OURS, Progress
from moevement_core.rendezvous.coordinator import Coordinator, State
from moevement_core.rendezvous.roster import Roster
from moevement_core.run_record import RunRecord

SAY_S = 5.0
"""How long ranks have to end by themselves after one has found a mistake in the flags."""


class Watch(ABC):
    """Asked again and again until it says that the job has ended."""

    @abstractmethod
    def is_running(self) -> bool:
        """Look at every process, and do what is to be done."""

    @abstractmethod
    def verdict(self) -> int:
        """The job's exit code, after it has said why if it is not 0; every process has ended."""


class UntilOneFails(Watch):
    """The first failure ends the job."""

    def __init__(self, children: list[Child]) -> None:
        self._children = children

    def is_running(self) -> bool:
        """Look."""
        codes = [child.poll() for child in self._children]
        if any(codes):
            _end_after_failure(self._children)
        return None in codes and not any(codes)

    def verdict(self) -> int:
        """Say which failed."""
        return _say_who_failed(self._children)


def _end_after_failure(children: list[Child]) -> None:
    """End all; but what the user can mend every rank finds, and one of them says it, maybe not the first to end."""
    deadline = time.monotonic() + SAY_S
    while USAGE_ERROR in [child.code for child in children] and time.monotonic() < deadline:
        if all(child.poll() is not None for child in children):
            return
        time.sleep(0.02)
    end_all(children)


def _say_who_failed(children: list[Child]) -> int:
    codes = [child.code for child in children]
    if not any(codes):
        return 0
    if USAGE_ERROR in codes:
        for child in children:
            lines = [line for line in child.lines_of("err") if line.startswith(OURS)]
            if lines:
                print("\n".join(lines), file=sys.stderr)
                break
        return USAGE_ERROR
    # A rank that is killed makes its peers fail by their broken connections, not the other way round; and those that
    # went on were ended by SIGTERM just now.
    failed = [child for child in children if child.code not in (0, None, -signal.SIGTERM)]
    child = min(failed or children, key=lambda one: (one.code or 0) >= 0)
    if (child.code or 0) > 0 and child.logs is not None:
        print("\n".join(child.lines_of("err")[-30:]), file=sys.stderr)
    where = f"; its output is in {child.logs}/{child.label}.out and .err" if child.logs is not None else ""
    name = child.label.replace("_", " ")
    print(f"moevement: {name} (pid {child.pid}) {child.how}{where}", file=sys.stderr)
    return 1


class ReplaceWhoDies(Watch):
    """A rank that dies is replaced by a spare, and for each process that dies a new one is started.

    Args:
        children: those that run, by their number; new ones are appended.
        start: starts one more.
        store: the job's, which this process holds.
        address: where it is.
        ranks: of the job.
        spare_timeout_s: how long to wait for a spare where none is left.
        record: where ``ranks.json`` is kept.
        progress: what the user sees.
    """

    def __init__(
        self,
        children: list[Child],
        start: Callable[[], Child],
        store: Any,
        address: tuple[str, int],
        ranks: int,
        spare_timeout_s: float,
        record: RunRecord | None,
        progress: Progress,
    ) -> None:
        self._children, self._start, self._store = children, start, store
        self._ranks, self._record, self._progress = ranks, record, progress
        from megatron.moevement.restart.store import InProcessWrapper

        wrapper = InProcessWrapper(store, address, ranks)
        self._coordinator = Coordinator(store, ranks, spare_timeout_s, progress.say, wrapper)
        self._roster = self._coordinator.roster
        self._seen: dict[int, int] = {}
        self._told: Any = None
        self._failed: Child | None = None
        self._stopped = ""

    def is_running(self) -> bool:
        """Look."""
        self._coordinator.step()
        for member, child in enumerate(self._children):
            if member not in self._seen and (code := child.poll()) is not None:
                self._seen[member] = code
                self._has_ended(member, child)
        self._coordinator.step()
        self._tell_roster()
        state = self._coordinator.state
        if state is State.STOPPED:
            self._stopped = self._stopped or self._store.get("stop").decode()
            end_all(self._children)
            return False
        if self._failed is not None:
            _end_after_failure(self._children)
            return False
        if state is State.DONE and all(self._children[one].poll() is not None for one in self._roster.ranks.values()):
            end_all(self._children)  # spares
            return False
        return True

    def _has_ended(self, member: int, child: Child) -> None:
        if self._coordinator.state in (State.DONE, State.STOPPED):
            return
        code = child.code or 0
        if code == USAGE_ERROR or (code > 0 and self._roster.generation < 0):
            self._failed = child  # a mistake in the flags, or in the script: it would be made again
            return
        rank = self._coordinator.died(member, child.pid, child.how)
        who = f"rank {rank}" if rank is not None else "a spare"
        new = self._start()
        self._children.append(new)
        self._progress.say(f"{who} (pid {child.pid}) {child.how}; started pid {new.pid} as a spare")
        _reap_orphans(self._children)

    def _tell_roster(self) -> None:
        roster = self._coordinator.roster
        if roster.generation != self._roster.generation:
            self._roster = roster
            if roster.generation > 0:
                self._progress.say(_sentence(roster, self._children))
            leader = self._children[roster.ranks[0]]
            if leader.logs is not None:
                self._progress.follow(leader.logs / f"{leader.label}.out")
        who = self._coordinator.who()
        if self._record is not None and who != self._told and roster.generation >= 0:
            self._told = who
            self._record.write_ranks(who)

    def verdict(self) -> int:
        """Say why the job has ended, if it did not come to its end."""
        if self._stopped:
            print(f"moevement: the job is stopped: {self._stopped}", file=sys.stderr)
            for child in self._children:
                if errors := child.lines_of("err"):
                    print("\n".join(errors[-15:]), file=sys.stderr)
                    break
            return 1
        if self._failed is not None:
            return _say_who_failed(self._children)
        ranks = [self._children[member] for member in self._roster.ranks.values()]
        # All have come to the end together: one that is killed on its way out takes nothing of the job with it.
        return _say_who_failed([child for child in ranks if (child.code or 0) >= 0])


def _sentence(roster: Roster, children: list[Child]) -> str:
    gone = {death.rank for death in roster.deaths}
    places = [f"pid {children[member].pid} is rank {rank} now" for rank, member in roster.ranks.items() if rank in gone]
    return ", ".join(places or ["all ranks begin anew"]) + f"; {roster.spares} spares are left"


def _reap_orphans(children: list[Child]) -> None:
    """Collect what processes that died have left behind and has ended meanwhile: this process has adopted it."""
    ours = {child.pid for child in children}
    for process in psutil.Process().children():
        with suppress(psutil.NoSuchProcess, ChildProcessError):
            if process.pid not in ours and process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, os.WNOHANG)
