"""Departure of a rank that was asked to leave: it hands its state to a peer at a boundary between iterations.

The other ranks cannot commit the next iteration without the rank that leaves. So its state is the newest of the job,
and the process that takes over its rank repeats nothing.
"""

from __future__ import annotations

import time

from moevement_core.rebuild.live_replicas import snapshot_of_live
from moevement_core.rendezvous.drains import HAND_OVER_LEASES, Departure
from moevement_core.rendezvous.status_page import own_page
from moevement_core.replication.sender import Sender
from moevement_core.restart.generation import RankLeaves, generation, waiting_for_others
from moevement_core.saving.saving import Saving
from moevement_core.snapshot.snapshot import Snapshot
from moevement_core.topology.topology import Topology


def leave_if_asked(saving: Saving, committed: int, lease_s: float, *, may_hand_over: bool) -> None:
    """Hand the state of this rank to a peer and raise, if this process was asked to give its rank back.

    Called before any part of the iteration after ``committed``. Only this rank does anything.

    Args:
        saving: saving of this rank's snapshots.
        committed: newest committed iteration, whose state is live.
        lease_s: lease time in seconds.
        may_hand_over: True if a recovery may use the state that this rank hands over.

    Raises:
        RankLeaves: this process is to give its rank back.
    """
    page, now = own_page(), generation()
    if page is None or now is None or not page.leaves_after(committed):
        return
    topology, deadline_s = saving.parts.topology, time.monotonic() + HAND_OVER_LEASES * lease_s
    elsewhere = [sender for sender in saving.peers.senders if _is_elsewhere(sender, topology)]
    if not elsewhere and page.leaving_before:
        now.report_departure(Departure.STAYS)
        return  # The peers of this rank may leave with it, so it leaves after them.
    now.report_departure(Departure.HANDS_OVER)
    why = "this job restores ranks from snapshots only"
    if may_hand_over:
        with waiting_for_others():
            why = _hand_over(saving, elsewhere or saving.peers.senders, committed, deadline_s)
    raise RankLeaves(why)


def _is_elsewhere(sender: Sender, topology: Topology) -> bool:
    return topology.nodes[sender.peer] != topology.nodes[topology.rank]


def _hand_over(saving: Saving, senders: list[Sender], committed: int, deadline_s: float) -> str:
    """Hand the state to one of the peers; return text that says who has it, or why nobody has."""
    if not senders:
        return "no peer keeps copies of this rank"
    try:
        snapshot = _state(saving, committed)
        if snapshot is None:
            return "this host has no memory for a copy of the state"
        for sender in senders:
            if sender.hand_over(snapshot, deadline_s - time.monotonic()):
                return f"rank {sender.peer} keeps its state after iteration {committed}"
    except (RuntimeError, MemoryError) as error:
        return f"its state could not be handed over: {error}"
    return "no peer has taken its state"


def _state(saving: Saving, committed: int) -> Snapshot | None:
    """Return a dense snapshot of this rank's state; None if the allowance for host memory is too small for it."""
    parts, states = saving.parts, saving.parts.binding.states()
    if not saving.has_room_for_state():
        return None
    return snapshot_of_live(
        states, parts.topology.table, parts.topology.rank, iteration=committed, boundary=parts.binding.boundary_copy()
    )
