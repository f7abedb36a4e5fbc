"""State of which neither a replica nor a shard is left: from snapshots that ranks took before the job had this size.

The snapshots of a window are cut for the ranks of now: each gets those that it would have taken had the job been of
this size then. With them it recovers as any rank does, inside the training loop: it makes updates again from logged
gradients, or runs the iterations of a sparse window again. The former gives the bits that were lost, whatever the
number of ranks, because an update is elementwise. The latter gives those of a job of this size that replays the window.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from megatron.moevement.elastic.boundary import fitted, fitted_record
from megatron.moevement.elastic.meeting import nearest_of_stage
from megatron.moevement.elastic.offer import Offer
from megatron.moevement.elastic.pieces import Stand, saved_piece, snapshot_pieces
from megatron.moevement.elastic.transfer import bring_pieces
from moevement_core import log
from moevement_core.elastic.exchange import Exchanged, StateMissing
from moevement_core.engine.layout import OperatorState
from moevement_core.errors import RecoveryError
from moevement_core.policy.schedule import Saved
from moevement_core.recovery.plan import RecoveryPlan, Report, Source, plan_recovery
from moevement_core.session.exchange import all_gather_objects
from moevement_core.session.prepare import Prepared
from moevement_core.session.sources import holding_of
from moevement_core.snapshot import plain
from moevement_core.snapshot.snapshot import (
    BOUNDARY,
    Entry,
    Header,
    Snapshot,
    StateTensor,
    aligned_bytes,
    as_bytes,
    digest_of,
    offsets,
)

Stands = tuple[Stand, ...]
"""Of all ranks of a job, in their order."""


@dataclass(frozen=True)
class _Kind:
    """What all snapshots of one iteration and stage have in common."""

    schedule: str
    slot: int
    contents: str
    state: int
    saved: Mapping[str, Saved]
    """By operator of which there are tensors."""


@dataclass(frozen=True, eq=False)
class Rebuilt:
    """What a rank recovers from."""

    prepared: Prepared
    boundary: Mapping[str, Any]
    """What stands beside the optimizer's state where the recovery ends."""
    exchanged: Exchanged


def prepare_from_snapshots(
    offer: Offer | None, states: Mapping[str, OperatorState], optimizer: Any, stand: Stand, *, is_verified: bool
) -> Rebuilt:
    """Plan a recovery from what ranks have of snapshots, and bring to each its part; every rank calls it.

    Args:
        offer: of this rank; None: it is new.
        states: the live tensors of this rank's operators; nothing is written to them.
        optimizer: Megatron's.
        stand: where this rank stands in the job of now.
        is_verified: see :func:`~moevement_core.elastic.exchange.exchange`.

    Raises:
        StateMissing: snapshots do not give a state either. On every rank alike.
    """
    began = time.perf_counter()
    plan, stands, handed_out = _agree(offer)
    snapshots: dict[int, Snapshot] = {}
    moved, digests = 0, dict[str, int]()
    recut = _Recut(plan, stands, states, optimizer, stand, is_verified=is_verified)
    for iteration in sorted({fetch.iteration for fetch in plan.fetches}):
        mine = [one for one in handed_out if one.iteration == iteration]
        snapshots[iteration], exchanged = recut.of_iteration(iteration, mine)
        moved += exchanged.moved_bytes
        digests |= exchanged.digests
    boundary = snapshots[max(snapshots)].record()["boundary"]
    plan = replace(plan, ranks=frozenset(range(stand.world)))
    prepared = Prepared(
        (plan,), plan, snapshots, {}, time.perf_counter() - began, is_comparable=not plan.iterations
    )  # fmt: skip
    return Rebuilt(prepared, boundary, Exchanged(moved, digests))


# Which snapshots


def _agree(offer: Offer | None) -> tuple[RecoveryPlan, Stands, list[Snapshot]]:
    """The plan that leads farthest, the ranks whose snapshots it uses, and those that this rank hands out.

    What turns out to be damaged is left out, and all plan again.
    """
    own = list(offer.snapshots) if offer is not None else []
    while True:
        plan, stands = _plan(offer, own)
        handed_out: list[Snapshot] = []
        damaged: list[Snapshot] = []
        if offer is not None and tuple(offer.stands) == stands:
            wanted = {(one.owner, one.iteration) for one in plan.fetches if one.holder == offer.stand.rank}
            for snapshot in own:
                if (snapshot.header.rank, snapshot.iteration) in wanted:
                    (handed_out if snapshot.damaged() is None else damaged).append(snapshot)
        count = sum(all_gather_objects(len(damaged)))
        if not count:
            return plan, stands, handed_out
        own = [one for one in own if one not in damaged]
        if dist.get_rank() == 0:
            log.warning(f"{count} snapshots are damaged; planning again without them")


def _plan(offer: Offer | None, snapshots: Sequence[Snapshot]) -> tuple[RecoveryPlan, Stands]:
    mine = None
    if offer is not None:
        rank = offer.stand.rank
        holdings = tuple(
            holding_of(one, Source.MEMORY if one.header.rank == rank else Source.PEER) for one in snapshots
        )
        mine = (tuple(offer.stands), rank, holdings)
    by_job: dict[Stands, dict[int, Any]] = defaultdict(dict)
    for its in all_gather_objects(mine):
        if its is not None:
            by_job[its[0]][its[1]] = its[2]
    plans, why = [], "nobody has a snapshot"
    for stands, held in by_job.items():
        reports = [Report(one.rank, one.stage, held.get(one.rank, ())) for one in stands]
        try:
            plans.append((plan_recovery(reports, None), stands))
        except RecoveryError as error:
            why = str(error)
    usable = [one for one in plans if not any(run.is_stale for run in one[0].runs.values())]
    if not usable:
        raise StateMissing(why)
    return max(usable, key=lambda one: (one[0].until, -len(one[1])))


# Their parts, to the ranks of now


class _Recut:
    """Snapshots of the ranks of then as those that this rank would have."""

    def __init__(
        self,
        plan: RecoveryPlan,
        stands: Stands,
        states: Mapping[str, OperatorState],
        optimizer: Any,
        stand: Stand,
        *,
        is_verified: bool,
    ) -> None:
        self._is_comparable, self._stands = not plan.iterations, stands
        self._states, self._optimizer, self._stand = states, optimizer, stand
        self._is_verified = is_verified

    def of_iteration(self, iteration: int, mine: Sequence[Snapshot]) -> tuple[Snapshot, Exchanged]:
        """One snapshot; every rank calls it.

        Args:
            iteration: of which.
            mine: what this rank hands out.
        """
        kind = self._kind(mine)
        wanted = [t for name, saved in sorted(kind.saved.items()) for t in _tensors(self._states.get(name), saved)]
        marked, kept = plain.flatten(self._record(mine))
        boundary = [StateTensor(BOUNDARY, Saved.FULL, str(number), t.contiguous()) for number, t in enumerate(kept)]
        buffer = torch.zeros(aligned_bytes([*wanted, *boundary]), dtype=torch.uint8)
        placed = list(offsets([*wanted, *boundary]))
        for tensor, at in placed[len(wanted) :]:
            buffer[at : at + tensor.nbytes] = as_bytes(tensor.tensor)
        pieces = [
            saved_piece(replace(t, tensor=buffer[at : at + t.nbytes].view(t.tensor.dtype)), self._stand)
            for t, at in placed[: len(wanted)]
        ]
        held = [piece for one in mine for piece in snapshot_pieces(one, self._stands[one.header.rank])]
        exchanged = bring_pieces(held, pieces, is_verified=self._is_verified)
        entries = tuple(
            Entry(
                t.operator, t.saved, t.key, str(t.tensor.dtype).removeprefix("torch."), at, t.nbytes,
                digest_of(buffer[at : at + t.nbytes]),
            )
            for t, at in placed
        )  # fmt: skip
        header = Header(
            self._stand.rank, iteration, kind.schedule, kind.slot, kind.contents, entries, marked, kind.state
        )
        return Snapshot(header, buffer), exchanged

    def _kind(self, mine: Sequence[Snapshot]) -> _Kind:
        """Of this rank's stage."""
        kinds: list[_Kind] = []
        for its in all_gather_objects(_kinds(mine, self._stands)):
            kinds += [kind for stage, kind in its if stage == self._stand.stage]
        return replace(kinds[0], saved={name: saved for kind in kinds for name, saved in kind.saved.items()})

    def _record(self, mine: Sequence[Snapshot]) -> dict[str, Any]:
        record = nearest_of_stage({self._stands[one.header.rank]: one.record() for one in mine}, self._stand)
        assert record is not None
        step = fitted_record(record["iteration"], self._optimizer, is_comparable=self._is_comparable)
        return {**record, "boundary": fitted(record["boundary"], self._optimizer), "iteration": step}


def _kinds(mine: Sequence[Snapshot], stands: Stands) -> list[tuple[int, _Kind]]:
    """Of each snapshot, and its stage."""
    return [
        (
            stands[its.rank].stage,
            _Kind(
                its.schedule, its.slot, its.contents, its.state,
                {entry.operator: entry.saved for entry in its.entries if entry.operator != BOUNDARY},
            ),
        )
        for its in (one.header for one in mine)
    ]  # fmt: skip


def _tensors(state: OperatorState | None, saved: Saved) -> Iterator[StateTensor]:
    if state is not None:
        every = {Saved.FULL: state.full, Saved.COMPUTE: state.compute, Saved.GRADIENT: state.gradient}
        yield from (tensor for tensor in every[saved] if tensor.nbytes)
