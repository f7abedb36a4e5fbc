"""Two ways for the launcher to watch its processes: one ends the job at a failure, the other replaces failed ranks."""

from __future__ import annotations

import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

from moevement_core import log
from moevement_core.launching.children import Child, end_all
from moevement_core.launching.job_file import JobOutcome
from moevement_core.launching.silence import HangDetector
from moevement_core.launching.supervisor import LocalLink, Supervisor, is_mistake
from moevement_core.rendezvous.coordinator import Coordinator, State
from moevement_core.rendezvous.process_list import process_entries
from moevement_core.rendezvous.respawns import WAIT_S
from moevement_core.rendezvous.roster import STOP, Roster
from moevement_core.rendezvous.status_page import StatusPage
from moevement_core.rendezvous.values import Values
from moevement_core.run.drain_requests import DrainRequests, DrainWatch
from moevement_core.run.progress import Progress
from moevement_core.run.run_record import RunRecord
from moevement_core.util.exit_codes import BROKEN_DEVICE, DRAINED, USAGE_ERROR
from moevement_core.util.words import spares_words

SAY_S = 5.0
"""Longest time in seconds for which the launcher waits until a rank has printed which mistake the flags have.

The wait begins when any rank has ended because of the mistake.
"""


class Watch(ABC):
    """Watch over the processes of a job; the launcher calls :meth:`is_running` in its loop until it returns False."""

    @abstractmethod
    def is_running(self) -> bool:
        """Look at every process, act on those that have ended, and return True if the job goes on."""

    def wind_down(self) -> bool:
        """Ask the job to end at the next boundary between iterations; return False if that is not possible."""
        return False

    @abstractmethod
    def verdict(self) -> JobOutcome:
        """Print the reason if the exit code of the job is not 0, and return the outcome of the job.

        The launcher calls this when every process has ended.
        """


class UntilOneFails(Watch):
    """Watch of a job without spares: the first failure ends the job. A hang is reported, but does not end the job.

    Args:
        children: processes of the ranks.
        record: record of the run; None: the run has no record.
        say: called with a line of text for the user.
        pages: status pages of the ranks. Only a rank whose script can end between iterations reports commits there.
        pause: waits for some seconds, and meanwhile serves the ranks.
    """

    def __init__(
        self,
        children: list[Child],
        record: RunRecord | None = None,
        say: Callable[[str], None] = lambda text: None,
        pages: Sequence[StatusPage] = (),
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._children, self._pages, self._pause = children, pages, pause
        self._silence = HangDetector(children, record, say)

    def is_running(self) -> bool:
        """Look at every process; end all of them if one has failed."""
        codes = [child.poll() for child in self._children]
        if None in codes:
            self._silence.look()
        if any(codes):
            _end_after_failure(self._children, self._pause)
        return None in codes and not any(codes)

    def wind_down(self) -> bool:
        """Ask the ranks to end at the next boundary between iterations; return False if no rank can do so.

        A rank can do so once it has reported a committed iteration.
        """
        for page in self._pages:
            page.ask_to_wind_down()
        return any(page.committed is not None for page in self._pages)

    def verdict(self) -> JobOutcome:
        """Print which rank has failed, if any, and return the outcome of the job."""
        return _say_who_failed(self._children)


def _end_after_failure(children: list[Child], pause: Callable[[float], None]) -> None:
    """End all processes. If a rank has found a mistake in the flags, first wait until the mistake has been printed.

    Every rank finds such a mistake, but only rank 0 prints it, and other ranks may end before rank 0 does.
    """
    deadline = time.monotonic() + SAY_S
    while USAGE_ERROR in [child.code for child in children] and time.monotonic() < deadline:
        if any(child.poll() == USAGE_ERROR and _has_reported(child) for child in children):
            break
        if all(child.poll() is not None for child in children):
            return
        pause(0.02)
    end_all(children)


def _has_reported(child: Child) -> bool:
    """Return True if an ended process has printed an error message.

    Without log files this cannot be checked. Then the function returns True for rank 0, which prints such messages.
    """
    return bool(_reports_of(child)) if child.logs is not None else child.label == "rank_0"


def _reports_of(child: Child) -> list[str]:
    return [line for line in child.lines_of("err") if line.startswith(log.PREFIXES)]


def _say_who_failed(children: list[Child]) -> JobOutcome:
    codes = [child.code for child in children]
    if not any(codes):
        return JobOutcome(0)
    if USAGE_ERROR in codes:
        lines = next((lines for child in children if (lines := _reports_of(child))), [])
        if not lines:  # a script that checks its flags itself, like argparse: its last line has the mistake
            mistaken = [child for child in children if child.code == USAGE_ERROR]
            lines = next((errors[-1:] for child in mistaken if (errors := child.lines_of("err"))), [])
        if lines:
            print("\n".join(lines), file=sys.stderr)
        return JobOutcome(USAGE_ERROR, "\n".join(map(log.message_of, lines)))
    # A killed rank breaks the connections of its peers, and the peers then fail. So a killed rank is named first.
    # Processes that the launcher itself has just ended are ignored.
    failed = [child for child in children if child.code not in (0, None) and not child.was_ended]
    child = min(failed or children, key=lambda candidate: (candidate.code or 0) >= 0)
    if (child.code or 0) > 0 and child.logs is not None:
        print("\n".join(child.lines_of("err")[-30:]), file=sys.stderr)
    where = f"; its output is in {child.logs}/{child.label}.out and .err" if child.logs is not None else ""
    name = child.label.replace("_", " ")
    reason = f"{name} (pid {child.pid}) {child.how}{where}"
    print(f"moevement: {reason}", file=sys.stderr)
    return JobOutcome(1, reason)


class ReplaceFailedRanks(Watch):
    """Watch of a job with spares: a spare replaces a failed rank, and a new process replaces each process that ends.

    Args:
        start: starts the process of a member; called with its number and with environment variables for the process.
        values: values of the job.
        groups: store of torch's process groups.
        ranks: number of ranks of the job.
        spares: number of processes beyond the ranks.
        spare_timeout_s: seconds that the job waits for a spare when none is left.
        lease_s: seconds after which a stopped process counts as dead.
        record: record of the run, for ``ranks.json``; None: nothing is recorded.
        progress: display of the job's progress, which also prints lines for the user.
        children: list to which the watch appends every process that it starts; the caller ends them all.
        respawn_after_s: seconds from the end of a process to the start of a new one in its place; infinite: none is
            started.
        pause: waits for some seconds, and meanwhile serves the processes.
    """

    def __init__(
        self,
        start: Callable[[int, dict[str, str]], Child],
        values: Values,
        groups: Any,
        ranks: int,
        spares: int,
        spare_timeout_s: float,
        lease_s: float,
        record: RunRecord | None,
        progress: Progress,
        children: list[Child],
        respawn_after_s: float = 0.0,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._pause = pause
        self._values, self._record, self._progress = values, record, progress
        self._drains = None if record is None else DrainWatch(DrainRequests(record.folder))
        self._coordinator = Coordinator(
            values, ranks, spare_timeout_s, progress.print_line, groups=groups, lease_s=lease_s,
            respawn_wait_s=WAIT_S if math.isfinite(respawn_after_s) else 0.0,
        )  # fmt: skip
        self._roster = self._coordinator.roster
        self._written: Any = None
        self._failed: Child | None = None
        self._stopped = ""
        numbers = count(ranks + spares)

        def start_listed(member: int, variables: dict[str, str]) -> Child:
            children.append(child := start(member, variables))
            return child

        self._children = children
        self._supervisor = Supervisor(
            first=range(ranks + spares), start=start_listed, next_member=lambda: next(numbers),
            link=LocalLink(self._coordinator), on_end=self._on_end, on_replaced=self._on_replaced,
            may_settle=self._may_settle, respawn_after_s=respawn_after_s,
        )  # fmt: skip

    def is_running(self) -> bool:
        """Let the coordinator and the supervisor act, and end all processes if the job has ended."""
        self._coordinator.step()
        self._supervisor.step()
        self._coordinator.step()
        if self._drains is not None:
            self._drains.look()
            self._drains.is_done(self._coordinator.drains.request(self._drains.standing))
        self._tell_roster()
        state = self._coordinator.state
        if state is State.STOPPED:
            self._stopped = self._stopped or self._values.read(STOP) or ""
            end_all(self._children)
            return False
        if self._failed is not None:
            _end_after_failure(self._children, self._pause)
            return False
        ranks = [self._supervisor.children[member] for member in self._roster.ranks.values()]
        if state is State.DONE and all(child.poll() is not None for child in ranks):
            end_all(self._children)  # All ranks have ended, and spares are left.
            return False
        return True

    def wind_down(self) -> bool:
        """Ask the job to end at the next boundary between iterations; return False if no generation was formed yet."""
        self._coordinator.wind_down()
        self._supervisor.wind_down()
        return self._roster.generation >= 0

    def _on_end(self, member: int, child: Child) -> bool:
        if self._coordinator.state in (State.DONE, State.STOPPED):
            return False
        coordinator = self._coordinator
        if is_mistake(child, has_begun=self._roster.generation >= 0, has_trained=coordinator.has_trained(member)):
            self._failed = self._failed or child  # Another process would fail in the same way.
            return False
        if (child.code or 0) > 0 and child.code not in (BROKEN_DEVICE, DRAINED):
            self._report_failed_start(member, child)
        coordinator.died(member, child.pid, child.how)
        return True

    def _report_failed_start(self, member: int, child: Child) -> None:
        """Print the errors of a spare that could not start. A process with a rank reports its errors itself."""
        if self._coordinator.roster.rank_of(member) is None:
            reasons = _reports_of(child)[-3:]
            self._progress.print_line(
                "\n".join([f"a spare (pid {child.pid}) cannot start; the job continues", *reasons])
            )

    def _may_settle(self) -> bool:
        """Return True if the job has a spare for each failed rank, so that it does not need new processes at once.

        New processes then idle at first, because their start would slow down the recovery.
        """
        if self._coordinator.blocks.waits:
            return False
        dead = {death.member for death in self._coordinator.losses.all}
        missing = sum(member in dead for member in self._coordinator.roster.ranks.values())
        return len(self._coordinator.spares.waiting(self._coordinator.roster)) >= missing

    def _on_replaced(self, member: int, old: Child, new: Child) -> None:
        death = next(death for death in self._coordinator.losses.all if death.member == member)
        subject = f"rank {death.rank}" if death.rank is not None else "a spare"
        self._progress.print_line(f"{subject} (pid {old.pid}) {death.how}; started pid {new.pid} as a spare")

    def _tell_roster(self) -> None:
        coordinator, roster = self._coordinator, self._coordinator.roster
        # A proposed roster that a further death supersedes is never formed, so nobody is told of it.
        if roster.generation != self._roster.generation and coordinator.state in (State.RUNNING, State.DONE):
            self._roster = roster
            if roster.generation > 0:
                self._progress.print_line(_sentence(roster, self._supervisor.children))
            leader = self._supervisor.children[roster.ranks[0]]
            if leader.logs is not None:
                self._progress.follow(leader.logs / f"{leader.label}.out")
        processes = process_entries(roster, coordinator.membership, coordinator.respawns)
        if self._record is not None and processes != self._written and self._roster.generation >= 0:
            self._written = processes
            self._record.write_ranks(processes)

    def verdict(self) -> JobOutcome:
        """Print why the job has ended early, if it has, and return the outcome of the job."""
        if self._stopped:
            print(f"moevement: the job is stopped: {self._stopped}", file=sys.stderr)
            for child in self._children:
                if errors := child.lines_of("err"):
                    print("\n".join(errors[-15:]), file=sys.stderr)
                    break
            return JobOutcome(1, self._stopped)
        if self._failed is not None:
            return _say_who_failed(self._children)
        ranks = [self._supervisor.children[member] for member in self._roster.ranks.values()]
        # All ranks have reached the end of the job together. A rank that is killed after that loses nothing.
        return _say_who_failed([child for child in ranks if (child.code or 0) >= 0])


def _sentence(roster: Roster, children: Mapping[int, Child]) -> str:
    lost_ranks = {death.rank for death in roster.deaths}
    places = [
        f"pid {children[member].pid} is rank {rank} now" for rank, member in roster.ranks.items() if rank in lost_ranks
    ]
    others = "all ranks restart"
    if roster.ranks_before is not None:
        others = f"{len(roster.ranks)} ranks continue in place of {roster.ranks_before} ranks"
    return ", ".join(places or [others]) + f"; spares: {spares_words(roster.spares, roster.starting)}"
