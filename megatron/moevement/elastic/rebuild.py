"""Rebuild of an elastic job's lost state from snapshots that ranks captured before the job changed its size.

Ranks rebuild if no survivor has some part of the newest state. They divide the snapshots of a window anew: each rank
gets the snapshots that it would have captured if the job had always had the present size. Each rank then recovers
inside the training loop as usual: by redo from logged gradients, or by replay of a sparse window. Redo reproduces the
lost state bit for bit with any number of ranks, because an update is elementwise. Replay gives the state that a job of
the present size computes from the window. This state may differ from the lost state in the last bits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron.moevement.elastic.boundary import fitted, fitted_record
from megatron.moevement.elastic.formation import Formation, FormationSnapshots
from megatron.moevement.elastic.meeting import nearest_of_stage
from megatron.moevement.elastic.pieces import RankPosition, saved_piece, snapshot_pieces
from megatron.moevement.elastic.transfer import bring_pieces
from moevement_core import log
from moevement_core.comms import plain
from moevement_core.comms.exchange import all_gather_objects
from moevement_core.elastic.exchange import Exchanged, StateMissing
from moevement_core.engine.layout import OperatorState
from moevement_core.errors import RecoveryError
from moevement_core.policy.schedule import Saved
from moevement_core.rebuild.prepare import Prepared
from moevement_core.recovery.holdings import Holding
from moevement_core.recovery.plan import RecoveryPlan, Report, plan_recovery
from moevement_core.snapshot.buffer import Buffer
from moevement_core.snapshot.snapshot import (
    BOUNDARY,
    Header,
    Snapshot,
    StateTensor,
    aligned_bytes,
    as_bytes,
    contents_of,
    contents_text,
    entries_of,
    offsets,
)
from moevement_core.util.words import counted


@dataclass(frozen=True)
class _Kind:
    """Header fields that all snapshots of one iteration and stage share."""

    schedule: str
    slot: int
    contents: str
    state: int
    saved: Mapping[str, Saved]
    """Kind of state (full state, compute weights or gradients) that the snapshots hold, by operator."""
    places: Mapping[str, int]
    """Index of each operator in ``contents``, which says what the snapshots hold of every operator.

    Snapshots of format 2 have no such index; their operators are left out.
    """

    def of_operators(self) -> Iterator[tuple[str, Saved]]:
        """Yield each operator of which the snapshots hold state, with the kind of the state."""
        contents = contents_of(self.contents)
        for name, saved in self.saved.items():
            if name not in self.places or contents[self.places[name]] != Saved.NOTHING:
                yield name, saved


@dataclass(frozen=True, eq=False)
class Rebuilt:
    """Result of :func:`prepare_from_snapshots`, from which this rank recovers inside the training loop."""

    prepared: Prepared
    boundary: Mapping[str, Any]
    """Boundary record of the iteration at which the recovery ends."""
    exchanged: Exchanged


def prepare_from_snapshots(
    kept_snapshots: Sequence[FormationSnapshots],
    states: Mapping[str, OperatorState],
    optimizer: Any,
    stand: RankPosition,
    *,
    until: int | None = None,
    is_verified: bool,
) -> Rebuilt:
    """Plan a recovery from the snapshots of all ranks, and send every rank the state that it needs. Collective.

    Args:
        kept_snapshots: snapshots that this rank has, grouped by the :class:`Formation` in which they were captured.
        states: live tensors of this rank's operators, which the function does not change.
        optimizer: Megatron's optimizer.
        stand: position of this rank in the resized job.
        until: iteration to reach; None for the newest iteration whose state the snapshots hold.
        is_verified: True to compare digests of all replicas, and of each operator before and after the transfer.

    Raises:
        StateMissing: the snapshots do not hold the whole state; every rank raises this error.
    """
    began = time.perf_counter()
    plan, formation, handed_out = _agree(kept_snapshots, until)
    snapshots: dict[int, Snapshot] = {}
    moved, digests = 0, dict[str, int]()
    recut = _Recut(plan, formation, states=states, optimizer=optimizer, stand=stand, is_verified=is_verified)
    for iteration in sorted({fetch.iteration for fetch in plan.fetches}):
        own = [snapshot for snapshot in handed_out if snapshot.iteration == iteration]
        snapshots[iteration], exchanged = recut.of_iteration(iteration, own)
        moved += exchanged.moved_bytes
        digests |= exchanged.digests
    boundary = snapshots[max(snapshots)].record()["boundary"]
    plan = replace(plan, ranks=frozenset(range(stand.world)))
    prepared = Prepared(
        plans=(plan,), own_plan=plan, snapshots=snapshots, outcomes={}, fetch_s=time.perf_counter() - began,
        is_comparable=not plan.iterations,
    )  # fmt: skip
    return Rebuilt(prepared, boundary, Exchanged(moved, digests))


# Choice of snapshots


def _agree(
    kept_snapshots: Sequence[FormationSnapshots], until: int | None
) -> tuple[RecoveryPlan, Formation, list[Snapshot]]:
    """Choose a plan on which all ranks agree, and open the snapshots that this rank sends for it. Collective.

    If a rank finds that a snapshot is damaged, all ranks make a new plan without it. The result is the plan, the
    formation that captured the plan's snapshots, and the snapshots that this rank sends.
    """
    usable = {held.formation: list(held.holdings) for held in kept_snapshots}
    while True:
        plan, formation, own = _plan(kept_snapshots, usable, until)
        handed_out: list[Snapshot] = []
        damaged: list[Holding] = []
        for holding in own:
            snapshot = next(held for held in kept_snapshots if held.formation == formation).open(holding)
            if snapshot is None or snapshot.damaged() is not None:
                damaged.append(holding)
            else:
                handed_out.append(snapshot)
        count = sum(all_gather_objects(len(damaged), int))
        if not count:
            return plan, formation, handed_out
        usable[formation] = [holding for holding in usable.get(formation, ()) if holding not in damaged]
        if dist.get_rank() == 0:
            log.warning(f"{counted(count, 'snapshot')} damaged or missing; ranks plan the recovery again without these")


def _plan(
    kept_snapshots: Sequence[FormationSnapshots], usable: Mapping[Formation, Sequence[Holding]], until: int | None
) -> tuple[RecoveryPlan, Formation, list[Holding]]:
    """Return the plan that reaches the newest iteration, and the snapshots that this rank has to send for it.

    Collective. A plan uses the snapshots of a single formation, which is also returned.
    """
    gathered = all_gather_objects(
        [(held.formation, held.own, tuple(usable[held.formation])) for held in kept_snapshots],
        list[tuple[Formation, int, tuple[Holding, ...]]],
    )
    by_job: dict[Formation, dict[tuple[int, int], list[tuple[bool, int, Holding]]]] = {}
    for rank, formations in enumerate(gathered):
        for formation, own, holdings in formations:
            for holding in holdings:
                places = by_job.setdefault(formation, {}).setdefault((holding.owner, holding.iteration), [])
                places.append((holding.owner != own, rank, holding))
    plans: list[tuple[RecoveryPlan, Formation]] = []
    why = "no rank has a snapshot"
    for formation, of_job in by_job.items():
        nearest = {which: min(places, key=lambda place: place[:2])[2] for which, places in of_job.items()}
        reports = [
            Report(stand.rank, stand.stage, tuple(held for (owner, _), held in nearest.items() if owner == stand.rank))
            for stand in formation.stands
        ]
        try:
            plans.append((plan_recovery(reports, until), formation))
        except RecoveryError as error:
            why = str(error)
    # Plans that leave operators at older versions are excluded: their cost is known only for the old formation.
    exact = [candidate for candidate in plans if not any(run.is_stale for run in candidate[0].runs.values())]
    if not exact:
        raise StateMissing(why)
    plan, formation = max(exact, key=lambda candidate: (candidate[0].until, candidate[1].generation))
    chosen = (
        min(by_job[formation][fetch.owner, fetch.iteration], key=lambda place: place[:2]) for fetch in plan.fetches
    )
    return plan, formation, [holding for _, rank, holding in chosen if rank == dist.get_rank()]


# Exchange of the parts


class _Recut:
    """Maker of this rank's snapshots from those of an old formation.

    They are the snapshots that this rank would have captured if the job had always had its present size.
    """

    def __init__(
        self,
        plan: RecoveryPlan,
        formation: Formation,
        states: Mapping[str, OperatorState],
        optimizer: Any,
        stand: RankPosition,
        *,
        is_verified: bool,
    ) -> None:
        self._is_comparable, self._stands = not plan.iterations, formation.stands
        self._states, self._optimizer, self._stand = states, optimizer, stand
        self._is_verified = is_verified

    def of_iteration(self, iteration: int, snapshots: Sequence[Snapshot]) -> tuple[Snapshot, Exchanged]:
        """Make this rank's snapshot of one iteration from those that ranks of the old formation captured. Collective.

        Args:
            iteration: iteration of the snapshot.
            snapshots: snapshots of this iteration whose state this rank sends to other ranks.

        Returns:
            The snapshot, and the result of the exchange.
        """
        kind = self._kind(snapshots)
        wanted = [t for name, saved in sorted(kind.of_operators()) for t in _tensors(self._states.get(name), saved)]
        marked, kept = plain.flatten(self._record(snapshots))
        boundary = [StateTensor(BOUNDARY, Saved.FULL, str(number), t.contiguous()) for number, t in enumerate(kept)]
        buffer = torch.zeros(aligned_bytes([*wanted, *boundary]), dtype=torch.uint8)
        placed = list(offsets([*wanted, *boundary]))
        for tensor, at in placed[len(wanted) :]:
            buffer[at : at + tensor.nbytes] = as_bytes(tensor.tensor)
        pieces = [
            saved_piece(replace(t, tensor=buffer[at : at + t.nbytes].view(t.tensor.dtype)), self._stand)
            for t, at in placed[: len(wanted)]
        ]
        stands = self._stands
        held = [piece for snapshot in snapshots for piece in snapshot_pieces(snapshot, stands[snapshot.header.rank])]
        exchanged = bring_pieces(held, pieces, is_verified=self._is_verified)
        entries = entries_of(placed, buffer, kind.places)
        header = Header(
            rank=self._stand.rank,
            iteration=iteration,
            schedule=kind.schedule,
            slot=kind.slot,
            contents=kind.contents,
            entries=entries,
            record=marked,
            state=kind.state,
        )
        return Snapshot(header, Buffer(buffer)), exchanged

    def _kind(self, snapshots: Sequence[Snapshot]) -> _Kind:
        """Return the header fields that the sent snapshots of this rank's stage share. Collective."""
        kinds: list[_Kind] = []
        for of_rank in all_gather_objects(_kinds(snapshots, self._stands), list[tuple[int, _Kind]]):
            kinds += [kind for stage, kind in of_rank if stage == self._stand.stage]
        lacking = np.logical_or.reduce([contents_of(kind.contents) == Saved.NOTHING for kind in kinds])
        contents = np.where(lacking, np.int8(Saved.NOTHING), contents_of(kinds[0].contents))
        return replace(
            kinds[0], contents=contents_text(contents),
            saved={name: saved for kind in kinds for name, saved in kind.saved.items()},
            places={name: place for kind in kinds for name, place in kind.places.items()},
        )  # fmt: skip

    def _record(self, snapshots: Sequence[Snapshot]) -> dict[str, Any]:
        record = nearest_of_stage(
            {self._stands[snapshot.header.rank]: _record_of(snapshot) for snapshot in snapshots}, self._stand
        )
        assert record is not None
        step = fitted_record(record["iteration"], self._optimizer, is_comparable=self._is_comparable)
        return {**record, "boundary": fitted(record["boundary"], self._optimizer), "iteration": step}


def _record_of(snapshot: Snapshot) -> dict[str, Any]:
    """Return a copy of the snapshot's record.

    The record's tensors are views of the snapshot's buffer, and a message with a view contains the whole buffer.
    """
    marked, tensors = plain.flatten(snapshot.record())
    return dict(plain.restore(marked, [tensor.clone() for tensor in tensors]))


def _kinds(snapshots: Sequence[Snapshot], stands: Sequence[RankPosition]) -> list[tuple[int, _Kind]]:
    """Return the stage and the shared header fields of each snapshot."""
    return [
        (
            stands[header.rank].stage,
            _Kind(
                schedule=header.schedule, slot=header.slot, contents=header.contents, state=header.state,
                saved={entry.operator: entry.saved for entry in header.entries if entry.operator != BOUNDARY},
                places={entry.operator: entry.place for entry in header.entries if entry.place >= 0},
            ),
        )
        for header in (snapshot.header for snapshot in snapshots)
    ]  # fmt: skip


def _tensors(state: OperatorState | None, saved: Saved) -> Iterator[StateTensor]:
    if state is not None:
        every = {Saved.FULL: state.full, Saved.COMPUTE: state.compute, Saved.GRADIENT: state.gradient}
        yield from (tensor for tensor in every[saved] if tensor.nbytes)
