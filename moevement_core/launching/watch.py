"""What the launcher does while processes run, and when one of them ends."""

from __future__ import annotations

import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

from moevement_core import log
from moevement_core.exit_codes import BROKEN_DEVICE, USAGE_ERROR
from moevement_core.launching.children import Child, end_all
from moevement_core.launching.job_file import Outcome
from moevement_core.launching.silence import Silence
from moevement_core.launching.supervisor import LocalLink, Supervisor, is_mistake
from moevement_core.progress import Progress
from moevement_core.rendezvous.coordinator import Coordinator, State
from moevement_core.rendezvous.respawns import WAIT_S
from moevement_core.rendezvous.roster import STOP, Roster
from moevement_core.rendezvous.signed_store import SignedStore
from moevement_core.rendezvous.status_page import StatusPage
from moevement_core.run_record import RunRecord
from moevement_core.words import spares_words

SAY_S = 5.0
"""How long ranks have to end by themselves after one has found a mistake in the flags."""


class Watch(ABC):
    """Asked again and again until it says that the job has ended."""

    @abstractmethod
    def is_running(self) -> bool:
        """Look at every process, and do what is to be done."""

    def wind_down(self) -> bool:
        """Have the job end at the next boundary between iterations; whether that is possible."""
        return False

    @abstractmethod
    def verdict(self) -> Outcome:
        """Return how the job ended, after printing why if its exit code is not 0; every process has ended."""


class UntilOneFails(Watch):
    """The first failure ends the job; a hang is said.

    Args:
        children: the ranks.
        record: of the run; None: there is none.
        say: what the user sees.
        pages: shared with the ranks; ranks that save their state every iteration report there and are asked there.
    """

    def __init__(
        self,
        children: list[Child],
        record: RunRecord | None = None,
        say: Callable[[str], None] = lambda text: None,
        pages: Sequence[StatusPage] = (),
    ) -> None:
        self._children, self._pages = children, pages
        self._silence = Silence(children, record, say)

    def is_running(self) -> bool:
        """Look."""
        codes = [child.poll() for child in self._children]
        if None in codes:
            self._silence.look()
        if any(codes):
            _end_after_failure(self._children)
        return None in codes and not any(codes)

    def wind_down(self) -> bool:
        """Ask the ranks to end at the next boundary; returns False where none has reported a committed iteration."""
        for page in self._pages:
            page.ask_to_wind_down()
        return any(page.committed is not None for page in self._pages)

    def verdict(self) -> Outcome:
        """Say which failed."""
        return _say_who_failed(self._children)


def _end_after_failure(children: list[Child]) -> None:
    """End all processes. A mistake is found by every rank and reported by one, which may not be the first to end."""
    deadline = time.monotonic() + SAY_S
    while USAGE_ERROR in [child.code for child in children] and time.monotonic() < deadline:
        if any(child.poll() == USAGE_ERROR and _has_reported(child) for child in children):
            break
        if all(child.poll() is not None for child in children):
            return
        time.sleep(0.02)
    end_all(children)


def _has_reported(child: Child) -> bool:
    """Return whether a process that has ended reported a mistake; where output is not kept, the first rank did."""
    return bool(_reports_of(child)) if child.logs is not None else child.label == "rank_0"


def _reports_of(child: Child) -> list[str]:
    return [line for line in child.lines_of("err") if line.startswith(log.PREFIXES)]


def _say_who_failed(children: list[Child]) -> Outcome:
    codes = [child.code for child in children]
    if not any(codes):
        return Outcome(0)
    if USAGE_ERROR in codes:
        lines = next((lines for child in children if (lines := _reports_of(child))), [])
        if lines:
            print("\n".join(lines), file=sys.stderr)
        return Outcome(USAGE_ERROR, "\n".join(map(log.message_of, lines)))
    # A rank that is killed makes its peers fail by their broken connections, not the other way round; and those that
    # went on were ended just now.
    failed = [child for child in children if child.code not in (0, None) and not child.was_ended]
    child = min(failed or children, key=lambda one: (one.code or 0) >= 0)
    if (child.code or 0) > 0 and child.logs is not None:
        print("\n".join(child.lines_of("err")[-30:]), file=sys.stderr)
    where = f"; its output is in {child.logs}/{child.label}.out and .err" if child.logs is not None else ""
    name = child.label.replace("_", " ")
    reason = f"{name} (pid {child.pid}) {child.how}{where}"
    print(f"moevement: {reason}", file=sys.stderr)
    return Outcome(1, reason)


class ReplaceWhoDies(Watch):
    """A rank that dies is replaced by a spare, and for each process that dies a new one is started.

    Args:
        start: starts the process of a member, with variables for its environment.
        store: the job's, which this process holds.
        ranks: of the job.
        spares: processes beyond them.
        spare_timeout_s: how long to wait for a spare where none is left.
        lease_s: after so many seconds in which it was found stopped a process is dead.
        record: where ``ranks.json`` is kept.
        progress: what the user sees.
        children: every process that is started is appended, for whoever ends them all.
        respawn_after_s: how long after a process has ended another one is started in its place; infinite: never.
    """

    def __init__(
        self,
        start: Callable[[int, dict[str, str]], Child],
        store: SignedStore,
        ranks: int,
        spares: int,
        spare_timeout_s: float,
        lease_s: float,
        record: RunRecord | None,
        progress: Progress,
        children: list[Child],
        respawn_after_s: float = 0.0,
    ) -> None:
        from moevement_core.restart.store import interrupt_in

        self._store, self._record, self._progress = store, record, progress
        self._coordinator = Coordinator(
            store, ranks, spare_timeout_s, progress.say, interrupt=interrupt_in(store), lease_s=lease_s,
            respawn_wait_s=WAIT_S if math.isfinite(respawn_after_s) else 0.0,
        )  # fmt: skip
        self._roster = self._coordinator.roster
        self._written: Any = None
        self._rejected = 0
        self._failed: Child | None = None
        self._stopped = ""
        numbers = count(ranks + spares)

        def start_listed(member: int, variables: dict[str, str]) -> Child:
            children.append(child := start(member, variables))
            return child

        self._children = children
        self._supervisor = Supervisor(
            range(ranks + spares), start_listed, lambda: next(numbers), LocalLink(self._coordinator),
            self._on_end, self._on_replaced, self._may_settle, respawn_after_s,
        )  # fmt: skip

    def is_running(self) -> bool:
        """Look."""
        self._coordinator.step()
        self._supervisor.step()
        self._coordinator.step()
        self._tell_roster()
        state = self._coordinator.state
        if state is State.STOPPED:
            self._stopped = self._stopped or (self._store.read(STOP) or b"").decode()
            end_all(self._children)
            return False
        if self._failed is not None:
            _end_after_failure(self._children)
            return False
        ranks = [self._supervisor.children[member] for member in self._roster.ranks.values()]
        if state is State.DONE and all(child.poll() is not None for child in ranks):
            end_all(self._children)  # spares
            return False
        return True

    def wind_down(self) -> bool:
        """Have the job end at the next boundary between iterations; whether it has begun, so that there is one."""
        self._coordinator.wind_down()
        self._supervisor.wind_down()
        return self._roster.generation >= 0

    def _on_end(self, member: int, child: Child) -> bool:
        if self._coordinator.state in (State.DONE, State.STOPPED):
            return False
        coordinator = self._coordinator
        if is_mistake(child, has_begun=self._roster.generation >= 0, has_trained=coordinator.has_trained(member)):
            self._failed = self._failed or child  # it would be made again
            return False
        if (child.code or 0) > 0 and child.code != BROKEN_DEVICE:
            self._report_failed_start(member, child)
        coordinator.died(member, child.pid, child.how)
        return True

    def _report_failed_start(self, member: int, child: Child) -> None:
        """Say what a process that has not trained found wrong; one that has trained reported its own failure."""
        if self._coordinator.roster.rank_of(member) is None:
            reasons = _reports_of(child)[-3:]
            self._progress.say("\n".join([f"a spare (pid {child.pid}) cannot start; the job goes on", *reasons]))

    def _may_settle(self) -> bool:
        """Where enough spares wait, who is started is not needed at once, and its start would hold up a recovery."""
        if self._coordinator.waits_for_respawn:
            return False
        dead = {death.member for death in self._coordinator.deaths}
        missing = sum(member in dead for member in self._coordinator.roster.ranks.values())
        return len(self._coordinator.waiting()) >= missing

    def _on_replaced(self, member: int, old: Child, new: Child) -> None:
        death = next(death for death in self._coordinator.deaths if death.member == member)
        who = f"rank {death.rank}" if death.rank is not None else "a spare"
        self._progress.say(f"{who} (pid {old.pid}) {death.how}; started pid {new.pid} as a spare")

    def _tell_roster(self) -> None:
        roster = self._coordinator.roster
        if roster.generation != self._roster.generation and self._coordinator.state is not State.PROPOSED:
            self._roster = roster
            if roster.generation > 0:
                self._progress.say(_sentence(roster, self._supervisor.children))
            leader = self._supervisor.children[roster.ranks[0]]
            if leader.logs is not None:
                self._progress.follow(leader.logs / f"{leader.label}.out")
        who = self._coordinator.who()
        if self._record is not None and who != self._written and self._roster.generation >= 0:
            self._written = who
            self._record.write_ranks(who)
        if self._record is not None and self._coordinator.rejected != self._rejected:
            self._rejected = self._coordinator.rejected
            self._record.write_strangers(self._rejected)

    def verdict(self) -> Outcome:
        """Say why the job has ended, if it did not come to its end."""
        if self._stopped:
            print(f"moevement: the job is stopped: {self._stopped}", file=sys.stderr)
            for child in self._children:
                if errors := child.lines_of("err"):
                    print("\n".join(errors[-15:]), file=sys.stderr)
                    break
            return Outcome(1, self._stopped)
        if self._failed is not None:
            return _say_who_failed(self._children)
        ranks = [self._supervisor.children[member] for member in self._roster.ranks.values()]
        # All have come to the end together: one that is killed on its way out takes nothing of the job with it.
        return _say_who_failed([child for child in ranks if (child.code or 0) >= 0])


def _sentence(roster: Roster, children: Mapping[int, Child]) -> str:
    gone = {death.rank for death in roster.deaths}
    places = [f"pid {children[member].pid} is rank {rank} now" for rank, member in roster.ranks.items() if rank in gone]
    others = "all ranks restart"
    if roster.ranks_before is not None:
        others = f"{len(roster.ranks)} ranks go on where {roster.ranks_before} were"
    return ", ".join(places or [others]) + f"; spares: {spares_words(roster.spares, roster.starting)}"
