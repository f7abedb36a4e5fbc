"""Rebuild of an elastic job's lost state from snapshots that ranks captured before the job changed its size.

Ranks rebuild if no survivor has some part of the newest state. They divide the snapshots of a window anew: each rank
gets the snapshots that it would have captured if the job had always had the present size. Each rank then recovers
inside the training loop as usual: by redo from logged gradients, or by replay of a sparse window. Redo reproduces the
lost state bit for bit with any number of ranks, because an update is elementwise. Replay gives the state that a job of
the present size computes from the window. This state may differ from the lost state in the last bits.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moevement_core import log
from moevement_core.comms import plain
from moevement_core.comms.codec import Plain
from moevement_core.comms.exchange import all_gather_objects
from moevement_core.elastic.exchange import Exchanged, Piece, StateMissing, bring_pieces
from moevement_core.elastic.layout import Formation, RankLayout
from moevement_core.engine.layout import OperatorState
from moevement_core.errors import RecoveryError
from moevement_core.policy.schedule import Saved
from moevement_core.rebuild.prepare import Prepared
from moevement_core.recovery.formation_snapshots import FormationSnapshots
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
from moevement_core.trainer.interface import BindingInterface
from moevement_core.trainer.recut import Recut
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
    binding: BindingInterface,
    *,
    until: int | None = None,
    is_verified: bool,
) -> Rebuilt:
    """Plan a recovery from the snapshots of all ranks, and send every rank the state that it needs. Collective.

    Args:
        kept_snapshots: snapshots that this rank has, grouped by the :class:`Formation` in which they were captured.
        binding: binding of this rank in the resized job, whose live tensors the function does not change.
        until: iteration to reach; None for the newest iteration whose state the snapshots hold.
        is_verified: True to compare digests of all replicas, and of each operator before and after the transfer.

    Raises:
        StateMissing: the snapshots do not hold the whole state; every rank raises this error.
    """
    began = time.perf_counter()
    plan, formation, handed_out = _agree(kept_snapshots, until)
    snapshots: dict[int, Snapshot] = {}
    moved, digests = 0, dict[str, int]()
    cut = _Cut(plan, formation, states=binding.states(), recut=binding.recut(), is_verified=is_verified)
    for iteration in sorted({fetch.iteration for fetch in plan.fetches}):
        own = [snapshot for snapshot in handed_out if snapshot.iteration == iteration]
        snapshots[iteration], exchanged = cut.of_iteration(iteration, own)
        moved += exchanged.moved_bytes
        digests |= exchanged.digests
    boundary = snapshots[max(snapshots)].record()["boundary"]
    plan = replace(plan, ranks=frozenset(range(dist.get_world_size())))
    prepared = Prepared(
        plans=(plan,), own_plan=plan, snapshots=snapshots, outcomes={}, fetch_s=time.perf_counter() - began,
        is_comparable=not plan.iterations,
    )  # fmt: skip
    return Rebuilt(prepared, boundary, Exchanged(moved, digests))


def nearest_of_stage(
    offered: Mapping[RankLayout, Mapping[str, Any]], layout: RankLayout
) -> tuple[RankLayout, Mapping[str, Any]] | None:
    """Choose a boundary or snapshot record for this rank from those that all ranks offer. Collective.

    The record is from this rank's stage, and if possible from the same shard. Data-parallel replicas draw the same
    random numbers, so all replicas can continue with the record of one replica.

    Args:
        offered: records that this rank offers, by the position of the rank that made each record.
        layout: position of this rank in the resized job.

    Returns:
        The chosen record, and the position of the rank that made it; None if no rank offers a record of this stage.
    """
    speakers: dict[tuple[int, tuple[int, ...]], int] = {}
    for rank, layouts in enumerate(all_gather_objects(list(offered), list[RankLayout])):
        for old in layouts:
            speakers.setdefault((old.stage, old.shard), rank)
    rank = dist.get_rank()
    own = {old: state for old, state in offered.items() if speakers[old.stage, old.shard] == rank}
    gathered = all_gather_objects({old: Plain(state) for old, state in own.items()}, dict[RankLayout, Plain])
    candidates = {old: plain.value for sent in gathered for old, plain in sent.items() if old.stage == layout.stage}
    if not candidates:
        return None
    nearest = min(candidates, key=lambda old: (*map(operator.ne, old.shard, layout.shard), old.rank))
    return nearest, candidates[nearest]


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
            Report(was.rank, was.stage, tuple(held for (owner, _), held in nearest.items() if owner == was.rank))
            for was in formation.layouts
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


class _Cut:
    """Maker of this rank's snapshots from those of an old formation.

    They are the snapshots that this rank would have captured if the job had always had its present size.
    """

    def __init__(
        self,
        plan: RecoveryPlan,
        formation: Formation,
        states: Mapping[str, OperatorState],
        recut: Recut,
        *,
        is_verified: bool,
    ) -> None:
        self._is_comparable, self._layouts = not plan.iterations, formation.layouts
        self._states, self._recut, self._layout = states, recut, recut.layout()
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
            self._recut.saved_piece(replace(t, tensor=buffer[at : at + t.nbytes].view(t.tensor.dtype)), self._layout)
            for t, at in placed[: len(wanted)]
        ]
        held = [piece for snapshot in snapshots for piece in self._pieces(snapshot)]
        exchanged = bring_pieces(held, pieces, is_verified=self._is_verified)
        entries = entries_of(placed, buffer, kind.places)
        header = Header(
            rank=self._layout.rank,
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
        for of_rank in all_gather_objects(_kinds(snapshots, self._layouts), list[tuple[int, _Kind]]):
            kinds += [kind for stage, kind in of_rank if stage == self._layout.stage]
        lacking = np.logical_or.reduce([contents_of(kind.contents) == Saved.NOTHING for kind in kinds])
        contents = np.where(lacking, np.int8(Saved.NOTHING), contents_of(kinds[0].contents))
        return replace(
            kinds[0], contents=contents_text(contents),
            saved={name: saved for kind in kinds for name, saved in kind.saved.items()},
            places={name: place for kind in kinds for name, place in kind.places.items()},
        )  # fmt: skip

    def _pieces(self, snapshot: Snapshot) -> Iterator[Piece]:
        """Yield the state of the operators in a snapshot of the old formation."""
        for entry in snapshot.header.entries:
            if entry.operator != BOUNDARY and entry.nbytes:
                tensor = snapshot.bytes_of(entry).view(getattr(torch, entry.dtype))
                saved = StateTensor(entry.operator, entry.saved, entry.key, tensor)
                yield self._recut.saved_piece(saved, self._layouts[snapshot.header.rank])

    def _record(self, snapshots: Sequence[Snapshot]) -> dict[str, Any]:
        nearest = nearest_of_stage(
            {self._layouts[snapshot.header.rank]: _record_of(snapshot) for snapshot in snapshots}, self._layout
        )
        assert nearest is not None
        source, record = nearest
        step = self._recut.fitted_step(record["iteration"], is_comparable=self._is_comparable)
        boundary = self._recut.fitted_boundary(record["boundary"], source)
        return {**record, "boundary": boundary, "iteration": step}


def _record_of(snapshot: Snapshot) -> dict[str, Any]:
    """Return a copy of the snapshot's record.

    The record's tensors are views of the snapshot's buffer, and a message with a view contains the whole buffer.
    """
    marked, tensors = plain.flatten(snapshot.record())
    return dict(plain.restore(marked, [tensor.clone() for tensor in tensors]))


def _kinds(snapshots: Sequence[Snapshot], layouts: Sequence[RankLayout]) -> list[tuple[int, _Kind]]:
    """Return the stage and the shared header fields of each snapshot."""
    return [
        (
            layouts[header.rank].stage,
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
