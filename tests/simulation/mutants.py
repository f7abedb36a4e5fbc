"""Known bugs, planted in product code: the simulation has to find each of them, or it would find no others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from moevement_core.engine.lifetime import Lifetime, Unneeded
from moevement_core.engine.own import OwnSnapshots
from moevement_core.launching.supervisor import Supervisor
from moevement_core.recovery.agree import decide
from moevement_core.rendezvous.coordinator import Coordinator
from moevement_core.rendezvous.member import Member
from moevement_core.rendezvous.membership import Membership
from moevement_core.rendezvous.roster import Roster
from moevement_core.rendezvous.status_page import StatusPage
from moevement_core.replication.replica_store import ReplicaStore
from moevement_core.session import rejoin
from moevement_core.snapshot import agreement
from moevement_core.topology import topology
from moevement_core.trainer.commit import UpdateCommit
from tests.simulation.modules import world

Patch = tuple[Any, str, Any]
Mutant = Callable[[], list[Patch]]


def freed_too_early() -> list[Patch]:
    """The first snapshot of the run to fall back to is freed with what is older."""
    learn = Lifetime.learn

    def wrong(self: Lifetime, agreed: Any, held: Iterable[int]) -> Unneeded:
        here = list(held)
        found = learn(self, agreed, here)
        return replace(found, old=[*found.old, *(one for one in here if one == self.persisted)])

    free_before = ReplicaStore.free_before
    return [
        (Lifetime, "learn", wrong),
        (ReplicaStore, "free_before", lambda self, iteration: free_before(self, iteration + 1)),
    ]


def copy_freed_too_early() -> list[Patch]:
    """Peers free one snapshot too many."""
    free_before = ReplicaStore.free_before
    return [(ReplicaStore, "free_before", lambda self, iteration: free_before(self, iteration + 1))]


def never_freed() -> list[Patch]:
    """Peers free nothing while they have memory."""
    return [(ReplicaStore, "free_before", lambda self, iteration: None)]


def acknowledged_by_one() -> list[Patch]:
    """What one peer has counts as if all had it."""

    def acked_by(self: OwnSnapshots, peers: Any) -> Mapping[int, Any]:
        return {at: one.contents for at, one in self._held.items() if one.snapshot}

    return [(OwnSnapshots, "acked_by", acked_by)]


def agrees_on_the_most() -> list[Patch]:
    """The job is as far as its farthest rank."""
    names = {**vars(dist), "ReduceOp": SimpleNamespace(MIN=dist.ReduceOp.MAX)}

    class Wrong:
        def __getattr__(self, name: str) -> Any:
            return names["ReduceOp"] if name == "ReduceOp" else getattr(dist, name)

    return [(agreement, "dist", Wrong())]


def lease_never_ends_here() -> list[Patch]:
    """A process acts, and is let, whatever became of its lease."""
    return [
        (StatusPage, "is_held", property(lambda self: True)), (Supervisor, "_fence", lambda self: None),
        (Supervisor, "_look_for_stopped", lambda self: None),
    ]  # fmt: skip


def lease_never_ends_there() -> list[Patch]:
    """The coordinator waits for ever for who is silent."""

    def lost(self: Membership) -> Iterator[Any]:
        self._stepped_at = self._clock()
        yield from ()

    return [(Membership, "lost", lost)]


def one_rank_for_two() -> list[Patch]:
    """A spare takes itself for the last rank while it is in no roster."""

    def rank_of(self: Roster, member: int) -> int | None:
        its = {holder: rank for rank, holder in self.ranks.items()}
        return its.get(member, max(self.ranks) if self.generation > 0 else None)

    return [(Roster, "rank_of", rank_of)]


def two_ranks_for_one() -> list[Patch]:
    """The same spare is given to every rank that is lost."""
    waiting = Coordinator.waiting
    return [(Coordinator, "waiting", lambda self: [one for one in waiting(self)[:1] for _ in range(4)])]


def enters_without_the_others() -> list[Patch]:
    """A member goes on by a roster that not all have acknowledged."""
    wait_for = Member._wait_for

    def wrong(self: Member, key: str) -> bytes:
        return b"go" if key.endswith("/start") else wait_for(self, key)

    return [(Member, "_wait_for", wrong)]


def goes_on_from_the_oldest() -> list[Patch]:
    """Where ranks have committed different iterations, the older one is the one to resume."""

    def wrong(statuses: Any) -> Any:
        known = [one.committed for one in statuses if one.committed is not None]
        least = min(known, default=None)
        return decide([replace(one, committed=least if one.committed is not None else None) for one in statuses])

    return [(rejoin, "decide", wrong)]


def does_not_follow() -> list[Patch]:
    """Ranks one update behind stay there."""
    return [(rejoin, "decide", lambda statuses: replace(decide(statuses), followers=frozenset()))]


def follows_without_an_update() -> list[Patch]:
    """They take the number of the iteration, and leave its update out."""

    def follow(self: UpdateCommit, iteration: int, outcome: Any, common: Any) -> None:
        self._trainer.iteration = iteration
        assert self.mark is not None
        self.mark = replace(self.mark, iteration=iteration)

    return [(UpdateCommit, "follow", follow)]


def copies_at_home() -> list[Patch]:
    """Copies are on the next rank, whatever node that is on."""

    def place(nodes: Any, replicas: int, *_: Any, **__: Any) -> Any:
        return [tuple((rank + step + 1) % len(nodes) for step in range(replicas)) for rank in range(len(nodes))]

    return [(topology, "place", place)]


def pages_are_lost() -> list[Patch]:
    """Memory of a snapshot that is read while it is freed is never given back."""

    def end_use(self: OwnSnapshots, held: Any) -> None:
        held.users -= 1
        self._read.discard(held)

    return [(OwnSnapshots, "end_use", end_use)]


def commits_without_all() -> list[Patch]:
    """An interruption may come between the update of the state and its mark."""

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
    """Spares take over in the order in which they came, wherever they are."""

    def wrong(self: Coordinator, missing: Any, survivors: Any, spares: Any) -> dict[int, int]:
        return dict(zip(missing, spares, strict=False))

    return [(Coordinator, "_take_over", wrong)]


def waits_for_no_start() -> list[Patch]:
    """A spare of another node is taken though a process starts on the node of the one that ended."""
    return [(Coordinator, "_wait_for_respawn", lambda self, missing, ranks: None)]


MUTANTS: list[Mutant] = [
    freed_too_early, copy_freed_too_early, never_freed, acknowledged_by_one, agrees_on_the_most, lease_never_ends_here,
    lease_never_ends_there, one_rank_for_two, two_ranks_for_one, enters_without_the_others, goes_on_from_the_oldest,
    does_not_follow, follows_without_an_update, copies_at_home, pages_are_lost, commits_without_all,
    spares_by_arrival, waits_for_no_start,
]  # fmt: skip


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """Product code has that bug in here."""
    patches = [patch.object(*one) for one in mutant()]
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in reversed(patches):
            one.stop()
