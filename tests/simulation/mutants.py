"""Known bugs that are planted in product code, one at a time. The simulation has to find each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from moevement_core.comms.tree import Reduction
from moevement_core.engine.lifetime import Lifetime, Unneeded
from moevement_core.engine.own import OwnSnapshots
from moevement_core.launching.supervisor import Supervisor
from moevement_core.recovery.agree import decide
from moevement_core.rendezvous.blocks import Blocks
from moevement_core.rendezvous.coordinator import Coordinator
from moevement_core.rendezvous.member import Member
from moevement_core.rendezvous.membership import Membership
from moevement_core.rendezvous.mirror import Mirror
from moevement_core.rendezvous.office import Office, Term
from moevement_core.rendezvous.roster import Roster
from moevement_core.rendezvous.spares import SparePool
from moevement_core.rendezvous.standby import Standby
from moevement_core.rendezvous.status_page import StatusPage
from moevement_core.replication.replica_store import ReplicaStore
from moevement_core.session import meeting
from moevement_core.snapshot import agreement
from moevement_core.topology import topology
from moevement_core.trainer.commit import UpdateCommit
from tests.simulation.modules import world

Patch = tuple[Any, str, Any]
Mutant = Callable[[], list[Patch]]


def freed_too_early() -> list[Patch]:
    """Free the first snapshot of the restore point together with older ones."""
    learn = Lifetime.learn

    def wrong(self: Lifetime, agreed: Any, held: Iterable[int]) -> Unneeded:
        here = list(held)
        unneeded = learn(self, agreed, here)
        needed = [iteration for iteration in here if iteration == self.first_needed]
        return replace(unneeded, old=[*unneeded.old, *needed])

    free_before = ReplicaStore.free_before
    return [
        (Lifetime, "learn", wrong),
        (ReplicaStore, "free_before", lambda self, iteration: free_before(self, iteration + 1)),
    ]


def copy_freed_too_early() -> list[Patch]:
    """Free one snapshot too many on each peer."""
    free_before = ReplicaStore.free_before
    return [(ReplicaStore, "free_before", lambda self, iteration: free_before(self, iteration + 1))]


def never_freed() -> list[Patch]:
    """Let peers free no snapshot of another rank while they have memory."""
    return [(ReplicaStore, "free_before", lambda self, iteration: None)]


def acknowledged_by_one() -> list[Patch]:
    """Count a snapshot that one peer has as if all peers had it."""

    def acked_by(self: OwnSnapshots, peers: Any) -> Mapping[int, Any]:
        return {at: held.contents for at, held in self._held.items() if held.snapshot}

    return [(OwnSnapshots, "acked_by", acked_by)]


def agrees_on_the_most() -> list[Patch]:
    """Agree on the progress of the farthest rank, not of the slowest."""
    return [(agreement, "Reduction", SimpleNamespace(MIN=Reduction.MAX))]


def lease_never_ends_here() -> list[Patch]:
    """Let processes continue after their lease has ended, and let supervisors tolerate it."""
    return [
        (StatusPage, "is_held", property(lambda self: True)), (Supervisor, "_fence", lambda self: None),
        (Supervisor, "_look_for_stopped", lambda self: None),
    ]  # fmt: skip


def lease_never_ends_there() -> list[Patch]:
    """Let the coordinator wait forever for silent nodes."""

    def lost(self: Membership) -> Iterator[Any]:
        self._stepped_at = self._clock()
        yield from ()

    return [(Membership, "lost", lost)]


def one_rank_for_two() -> list[Patch]:
    """Let a spare that is in no roster take itself for the last rank."""

    def rank_of(self: Roster, member: int) -> int | None:
        rank_of_member = {holder: rank for rank, holder in self.ranks.items()}
        return rank_of_member.get(member, self.world - 1 if self.generation > 0 else None)

    return [(Roster, "rank_of", rank_of)]


def two_ranks_for_one() -> list[Patch]:
    """Assign the same spare to every lost rank."""
    waiting = SparePool.waiting
    return [
        (SparePool, "waiting", lambda self, roster: [spare for spare in waiting(self, roster)[:1] for _ in range(4)])
    ]


def enters_without_the_others() -> list[Patch]:
    """Let a member use a roster that not all members have acknowledged."""
    return [(Member, "_may_start", lambda self: True)]


def goes_on_from_the_oldest() -> list[Patch]:
    """Resume the oldest of the iterations that ranks have committed, not the newest."""

    def wrong(statuses: Any) -> Any:
        known = [status.committed for status in statuses if status.committed is not None]
        least = min(known, default=None)
        return decide(
            [replace(status, committed=least if status.committed is not None else None) for status in statuses]
        )

    return [(meeting, "decide", wrong)]


def does_not_follow() -> list[Patch]:
    """Do not bring ranks that are one update behind up to date."""
    return [(meeting, "decide", lambda statuses: replace(decide(statuses), followers=frozenset()))]


def follows_without_an_update() -> list[Patch]:
    """Let ranks that are one update behind mark the iteration as committed without applying its update."""

    def follow(self: UpdateCommit, iteration: int, outcome: Any, common: Any) -> None:
        self._trainer.iteration = iteration
        assert self.mark is not None
        self.mark = replace(self.mark, iteration=iteration)

    return [(UpdateCommit, "follow", follow)]


def copies_at_home() -> list[Patch]:
    """Place copies on the next ranks, whatever their nodes are."""

    def place(nodes: Any, replicas: int, *_: Any, **__: Any) -> Any:
        return [tuple((rank + step + 1) % len(nodes) for step in range(replicas)) for rank in range(len(nodes))]

    return [(topology, "place", place)]


def pages_are_lost() -> list[Patch]:
    """Never return the memory of a snapshot that is freed while it is read."""

    def end_use(self: OwnSnapshots, held: Any, *, has_failed: bool = False) -> None:
        held.users -= 1
        self._read.discard(held)

    return [(OwnSnapshots, "end_use", end_use)]


def commits_without_all() -> list[Patch]:
    """Allow an interruption after the state is updated and before the commit is marked."""

    def update(self: UpdateCommit, iteration: int, outcome: Any) -> None:
        self._trainer.update(outcome)
        world().current().atomic -= 1
        try:
            world().sleep(0.05)
        finally:
            world().current().atomic += 1
        self._trainer.iteration = iteration
        from moevement_core.trainer.commit import Mark

        self.mark = Mark(iteration, self._trainer.boundary_copy(), outcome)

    return [(UpdateCommit, "_update", update)]


def spares_by_arrival() -> list[Patch]:
    """Let spares take over in the order of their arrival, whatever their nodes are."""

    def wrong(self: Coordinator, missing: Any, survivors: Any, spares: Any) -> dict[int, int]:
        return dict(zip(missing, spares, strict=False))

    return [(Coordinator, "_take_over", wrong)]


def waits_for_no_start() -> list[Patch]:
    """Take a spare of another node although a process starts on the node of the failed rank."""
    return [(Blocks, "wait_for_starts", lambda *_, **__: None)]


def takes_over_without_a_majority() -> list[Patch]:
    """Let a standby take over that only hears nothing of the coordinator."""

    def stand(self: Standby) -> None:
        if self._may_take_over and self._clock() - self._heard_at > self.lease_s:
            self._hang_up()
            self._is_candidate = self.is_elected = True
            self.term = Term(self.term.number + 1, self._address)

    return [(Standby, "_stand", stand)]


def drops_the_standby_alone() -> list[Patch]:
    """Let a coordinator go on without its standby although no supervisor has agreed."""

    def drop(self: Office) -> None:
        if self.standby:
            self.standby_has_ended()

    return [(Office, "drop", drop)]


def does_not_tell_the_standby() -> list[Patch]:
    """Tell supervisors what the standby does not know, as if it knew everything that it has asked for once."""
    note = Mirror._note

    def wrong(self: Mirror, operation: Any) -> None:
        if not self._has_copied:
            note(self, operation)

    return [(Mirror, "_note", wrong)]


MUTANTS: list[Mutant] = [
    freed_too_early, copy_freed_too_early, never_freed, acknowledged_by_one, agrees_on_the_most, lease_never_ends_here,
    lease_never_ends_there, one_rank_for_two, two_ranks_for_one, enters_without_the_others, goes_on_from_the_oldest,
    does_not_follow, follows_without_an_update, copies_at_home, pages_are_lost, commits_without_all,
    spares_by_arrival, waits_for_no_start, takes_over_without_a_majority, does_not_tell_the_standby,
    drops_the_standby_alone,
]  # fmt: skip


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """Plant the bug in product code inside the ``with`` block."""
    patches = [patch.object(*replacement) for replacement in mutant()]
    for patcher in patches:
        patcher.start()
    try:
        yield
    finally:
        for patcher in reversed(patches):
            patcher.stop()
