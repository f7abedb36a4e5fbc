"""State of which neither a replica nor a shard is left: from snapshots that ranks took before the job had this size.

The snapshots of a window are cut for the ranks of now: each gets those that it would have taken had the job been of
this size then. With them it recovers as any rank does, inside the training loop: it makes updates again from logged
gradients, or runs the iterations of a sparse window again. The former gives the bits that were lost, whatever the
number of ranks, because an update is elementwise. The latter gives those of a job of this size that replays the window.
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
from megatron.moevement.elastic.held import Formation, Held
from megatron.moevement.elastic.meeting import nearest_of_stage
from megatron.moevement.elastic.pieces import Stand, saved_piece, snapshot_pieces
from megatron.moevement.elastic.transfer import bring_pieces
from moevement_core import log
from moevement_core.elastic.exchange import Exchanged, StateMissing
from moevement_core.engine.layout import OperatorState
from moevement_core.errors import RecoveryError
from moevement_core.policy.schedule import Saved
from moevement_core.recovery.places import Holding
from moevement_core.recovery.plan import RecoveryPlan, Report, plan_recovery
from moevement_core.session.exchange import all_gather_objects
from moevement_core.session.prepare import Prepared
from moevement_core.snapshot import plain
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


@dataclass(frozen=True)
class _Kind:
    """Common header of all snapshots of one iteration and stage."""

    schedule: str
    slot: int
    contents: str
    state: int
    saved: Mapping[str, Saved]
    """Kinds of state by operator of which there are tensors."""
    places: Mapping[str, int]
    """Positions of operators in the stage's table; without those of windows that do not state it."""

    def of_operators(self) -> Iterator[tuple[str, Saved]]:
        """Yield the operators of which no rank has released anything, with what is held of them."""
        contents = contents_of(self.contents)
        for name, saved in self.saved.items():
            if name not in self.places or contents[self.places[name]] != Saved.NOTHING:
                yield name, saved


@dataclass(frozen=True, eq=False)
class Rebuilt:
    """Result of the rebuild, from which a rank recovers."""

    prepared: Prepared
    boundary: Mapping[str, Any]
    """Boundary state where the recovery ends."""
    exchanged: Exchanged


def prepare_from_snapshots(
    helds: Sequence[Held],
    states: Mapping[str, OperatorState],
    optimizer: Any,
    stand: Stand,
    *,
    until: int | None = None,
    is_verified: bool,
) -> Rebuilt:
    """Plan a recovery from what ranks have of snapshots, and bring to each its part; every rank calls it.

    Args:
        helds: what this rank has of snapshots of one job, or of several.
        states: the live tensors of this rank's operators; nothing is written to them.
        optimizer: Megatron's.
        stand: where this rank stands in the job of now.
        until: the iteration to reach; None: the newest whose state the snapshots hold.
        is_verified: see :func:`~moevement_core.elastic.exchange.exchange`.

    Raises:
        StateMissing: snapshots do not give a state. On every rank alike.
    """
    began = time.perf_counter()
    plan, formation, handed_out = _agree(helds, until)
    snapshots: dict[int, Snapshot] = {}
    moved, digests = 0, dict[str, int]()
    recut = _Recut(plan, formation, states, optimizer, stand, is_verified=is_verified)
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


def _agree(helds: Sequence[Held], until: int | None) -> tuple[RecoveryPlan, Formation, list[Snapshot]]:
    """The plan that leads farthest, the ranks whose snapshots it uses, and those that this rank hands out.

    What turns out to be damaged is left out, and all plan again.
    """
    usable = {held.formation: list(held.holdings) for held in helds}
    while True:
        plan, formation, mine = _plan(helds, usable, until)
        handed_out: list[Snapshot] = []
        damaged: list[Holding] = []
        for one in mine:
            snapshot = next(held for held in helds if held.formation == formation).open(one)
            if snapshot is None or snapshot.damaged() is not None:
                damaged.append(one)
            else:
                handed_out.append(snapshot)
        count = sum(all_gather_objects(len(damaged), int))
        if not count:
            return plan, formation, handed_out
        usable[formation] = [one for one in usable.get(formation, ()) if one not in damaged]
        if dist.get_rank() == 0:
            log.warning(f"{count} snapshots are damaged or gone; planning again without them")


def _plan(
    helds: Sequence[Held], usable: Mapping[Formation, Sequence[Holding]], until: int | None
) -> tuple[RecoveryPlan, Formation, list[Holding]]:
    """The plan, the job whose snapshots it uses, and which of them this rank hands out."""
    everyones = all_gather_objects(
        [(held.formation, held.own, tuple(usable[held.formation])) for held in helds],
        list[tuple[Formation, int, tuple[Holding, ...]]],
    )
    by_job: dict[Formation, dict[tuple[int, int], list[tuple[bool, int, Holding]]]] = {}
    for rank, its in enumerate(everyones):
        for formation, own, holdings in its:
            for one in holdings:
                places = by_job.setdefault(formation, {}).setdefault((one.owner, one.iteration), [])
                places.append((one.owner != own, rank, one))
    plans: list[tuple[RecoveryPlan, Formation]] = []
    why = "nobody has a snapshot"
    for formation, of_job in by_job.items():
        nearest = {which: min(its, key=lambda one: one[:2])[2] for which, its in of_job.items()}
        reports = [
            Report(one.rank, one.stage, tuple(held for (owner, _), held in nearest.items() if owner == one.rank))
            for one in formation.stands
        ]
        try:
            plans.append((plan_recovery(reports, until), formation))
        except RecoveryError as error:
            why = str(error)
    # Strategies that leave operators at older versions count what that costs by ranks of then.
    exact = [one for one in plans if not any(run.is_stale for run in one[0].runs.values())]
    if not exact:
        raise StateMissing(why)
    plan, formation = max(exact, key=lambda one: (one[0].until, one[1].generation))
    chosen = (min(by_job[formation][one.owner, one.iteration], key=lambda its: its[:2]) for one in plan.fetches)
    return plan, formation, [holding for _, rank, holding in chosen if rank == dist.get_rank()]


# Their parts, to the ranks of now


class _Recut:
    """Snapshots of the ranks of then as those that this rank would have."""

    def __init__(
        self,
        plan: RecoveryPlan,
        formation: Formation,
        states: Mapping[str, OperatorState],
        optimizer: Any,
        stand: Stand,
        *,
        is_verified: bool,
    ) -> None:
        self._is_comparable, self._stands = not plan.iterations, formation.stands
        self._states, self._optimizer, self._stand = states, optimizer, stand
        self._is_verified = is_verified

    def of_iteration(self, iteration: int, mine: Sequence[Snapshot]) -> tuple[Snapshot, Exchanged]:
        """Return one snapshot. Collective.

        Args:
            iteration: of which.
            mine: what this rank hands out.
        """
        kind = self._kind(mine)
        wanted = [t for name, saved in sorted(kind.of_operators()) for t in _tensors(self._states.get(name), saved)]
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
        entries = entries_of(placed, buffer, kind.places)
        header = Header(
            self._stand.rank, iteration, kind.schedule, kind.slot, kind.contents, entries, marked, kind.state
        )
        return Snapshot(header, Buffer(buffer)), exchanged

    def _kind(self, mine: Sequence[Snapshot]) -> _Kind:
        """Return the header of this rank's stage."""
        kinds: list[_Kind] = []
        for its in all_gather_objects(_kinds(mine, self._stands), list[tuple[int, _Kind]]):
            kinds += [kind for stage, kind in its if stage == self._stand.stage]
        lacking = np.logical_or.reduce([contents_of(kind.contents) == Saved.NOTHING for kind in kinds])
        contents = np.where(lacking, np.int8(Saved.NOTHING), contents_of(kinds[0].contents))
        return replace(
            kinds[0], contents=contents_text(contents),
            saved={name: saved for kind in kinds for name, saved in kind.saved.items()},
            places={name: place for kind in kinds for name, place in kind.places.items()},
        )  # fmt: skip

    def _record(self, mine: Sequence[Snapshot]) -> dict[str, Any]:
        record = nearest_of_stage({self._stands[one.header.rank]: _record_of(one) for one in mine}, self._stand)
        assert record is not None
        step = fitted_record(record["iteration"], self._optimizer, is_comparable=self._is_comparable)
        return {**record, "boundary": fitted(record["boundary"], self._optimizer), "iteration": step}


def _record_of(snapshot: Snapshot) -> dict[str, Any]:
    """Apart from the snapshot: a tensor that is a view travels with all that it is a view of."""
    marked, tensors = plain.flatten(snapshot.record())
    return dict(plain.restore(marked, [tensor.clone() for tensor in tensors]))


def _kinds(mine: Sequence[Snapshot], stands: Sequence[Stand]) -> list[tuple[int, _Kind]]:
    """Return the stage and header of each snapshot."""
    return [
        (
            stands[its.rank].stage,
            _Kind(
                its.schedule, its.slot, its.contents, its.state,
                {entry.operator: entry.saved for entry in its.entries if entry.operator != BOUNDARY},
                {entry.operator: entry.place for entry in its.entries if entry.place >= 0},
            ),
        )
        for its in (one.header for one in mine)
    ]  # fmt: skip


def _tensors(state: OperatorState | None, saved: Saved) -> Iterator[StateTensor]:
    if state is not None:
        every = {Saved.FULL: state.full, Saved.COMPUTE: state.compute, Saved.GRADIENT: state.gradient}
        yield from (tensor for tensor in every[saved] if tensor.nbytes)
