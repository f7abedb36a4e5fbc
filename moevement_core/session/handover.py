"""Departure of a rank that was asked to leave: it hands its state to a peer at a boundary between iterations.

The other ranks cannot commit the next iteration without the rank that leaves. So its state is the newest of the job,
and the process that takes over its rank repeats nothing.
"""

from __future__ import annotations

from moevement_core.rebuild.live_replicas import snapshot_of_live
from moevement_core.rendezvous.status_page import own_page
from moevement_core.restart.generation import RankLeaves, generation, waiting_for_others
from moevement_core.saving.saving import Saving


def leave_if_asked(saving: Saving, committed: int, timeout_s: float, *, may_hand_over: bool) -> None:
    """Hand the state of this rank to a peer and raise, if this process was asked to give its rank back.

    Called before any part of the iteration after ``committed``. Only this rank does anything.

    Args:
        saving: saving of this rank's snapshots.
        committed: newest committed iteration, whose state is live.
        timeout_s: longest time to wait for a peer, in seconds.
        may_hand_over: True if a recovery may use the state that this rank hands over.

    Raises:
        RankLeaves: this process is to give its rank back.
    """
    page = own_page()
    if page is None or generation() is None or not page.leaves_after(committed):
        return
    why = "this job restores ranks from snapshots only"
    if may_hand_over:
        why = "no peer has taken its state"
        parts = saving.parts
        snapshot = snapshot_of_live(
            parts.binding.states(), parts.topology.table, parts.topology.rank,
            iteration=committed, boundary=parts.binding.boundary_copy(),
        )  # fmt: skip
        for sender in saving.peers.senders:
            with waiting_for_others():
                is_kept = sender.hand_over(snapshot, timeout_s)
            if is_kept:
                raise RankLeaves(f"rank {sender.peer} keeps its state after iteration {committed}")
    raise RankLeaves(f"its replacement repeats iterations, because {why}")
