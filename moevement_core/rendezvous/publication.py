"""Publication of rosters as values of the job: one value without the entries by rank, and one for each shard."""

from __future__ import annotations

from collections.abc import Iterable

from moevement_core.rendezvous.roster import MEMBERS_IN_SHARD, ROSTER, SHARD, SHARDS, Roster, RosterShard
from moevement_core.rendezvous.values import Values


def publish(values: Values, roster: Roster, members: Iterable[int]) -> None:
    """Set the values of a new roster. All ``members`` that live read a shard, even those without a rank."""
    generation, (head, shards) = roster.generation, roster.divided()
    values.set(SHARDS, f"{generation} {','.join(map(str, sorted(shards)))}")
    for number in {member // MEMBERS_IN_SHARD for member in members}:
        shard = shards.get(number, RosterShard({}, {}, {}))
        values.set(SHARD.format(number), f"{generation} {shard.encode()}")
    values.set(ROSTER, f"{generation} {head.encode()}")


def published(values: Values) -> Roster | None:
    """Return the newest roster with the entries of all ranks; None if there is none."""
    if (head := values.read(ROSTER)) is None:
        return None
    numbers = (values.read(SHARDS) or "").partition(" ")[2]
    shards = [(values.read(SHARD.format(number)) or "").partition(" ")[2] for number in numbers.split(",")]
    return Roster.decode(head.partition(" ")[2]).joined(map(RosterShard.decode, shards))
