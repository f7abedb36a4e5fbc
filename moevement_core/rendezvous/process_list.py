"""List of the processes of a job, as ``ranks.json`` in the run directory has it."""

from __future__ import annotations

from typing import Any

from moevement_core.rendezvous.membership import Membership
from moevement_core.rendezvous.respawns import Respawns
from moevement_core.rendezvous.roster import Roster


def process_entries(roster: Roster, membership: Membership, respawns: Respawns) -> list[dict[str, Any]]:
    """Return the entries of ``ranks.json``: ranks in ascending order, then spares, then starting processes."""
    with_rank = [
        (rank, membership.alive[member]) for rank, member in sorted(roster.ranks.items()) if member in membership.alive
    ]
    spares = [(None, info) for info in membership.waiting(set(roster.ranks.values()))]
    joined = [
        {
            "rank": rank, "pid": info.pid, "host": info.host, "node": info.node,
            "role": "spare" if rank is None else "active",
        }
        for rank, info in [*with_rank, *spares]
    ]  # fmt: skip
    starting = [
        {"rank": None, "pid": None, "host": node, "node": node, "role": "starting"}
        for node, count in respawns.starting().items()
        for _ in range(count)
    ]
    return joined + starting
