"""Which snapshots a recovery starts from and who has them: plain data, from what the ranks report.

When all stages roll back together they replay in step, so they begin at the same iteration: the newest one at which a
recoverable run of every stage begins (MoEvement section 3.3; the paper's global path).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from moevement_core.errors import RecoveryError
from moevement_core.policy.recoverable import RecoverableRun, recoverable_runs
from moevement_core.policy.redo import RedoRun, redo_runs
from moevement_core.policy.schedule import Contents, Saved
from moevement_core.policy.versions import leaves_out, version_runs
from moevement_core.recovery.places import Fetch, Holding, Place, Source
from moevement_core.recovery.sums import Summed, places_in_sums
from moevement_core.snapshot.snapshot import contents_of


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank has. Whether every byte of it is whole is found when it is fetched."""

    rank: int
    stage: int
    holdings: tuple[Holding, ...]
    logged: tuple[int, ...] = ()
    """Iterations of which it has everything that it sent over its stage's boundaries."""
    outcomes: Mapping[int, Any] = field(default_factory=dict)
    """What came of recent iterations, by their number."""
    replica: int = 0
    """A name that ranks of one model replica, through all stages, have in common."""
    summed: tuple[Summed, ...] = ()
    """Parity that it has."""
    stands_for: Mapping[int, int] = field(default_factory=dict)
    """Ranks whose state is live here, too: by rank, the operators of their stage."""
    arithmetic: str = ""
    """What bits depend on in this process, in words (:mod:`moevement_core.arithmetic`)."""
    is_repeatable: bool = True
    """Whether this process comes to the same bits when it repeats a computation."""
    placed_since: int | None = None
    """The iteration after which all were computed with every rank on the node and device of now, as far as this rank
    has seen; None: it has seen no iteration."""


@dataclass(frozen=True, slots=True, eq=False)
class RecoveryPlan:
    """What is replayed and from what."""

    first: int
    """a: where replay begins, from ``state@first``."""
    dense_at: int
    """The first iteration at which every operator of every stage is active."""
    until: int
    """The iteration whose state is to be reached."""
    begins: int
    """The iteration whose state the first snapshots hold; those after it are run again."""
    runs: Mapping[int, RecoverableRun]
    """By stage."""
    fetches: tuple[Fetch, ...]
    """Every snapshot that is used, of every rank, in the order of iterations."""
    ranks: frozenset[int] = frozenset()
    """The ranks whose state is restored: all of the stages, or those alone that lost theirs."""
    redone_until: int | None = None
    """The iteration up to which updates are made again from gradients; iterations are run again after it. None: all are
    run again."""

    @property
    def iterations(self) -> range:
        """Those that are run again."""
        return range((self.begins if self.redone_until is None else self.redone_until) + 1, self.until + 1)

    @property
    def redone(self) -> range:
        """Those of which only the update is made again."""
        return range(self.begins + 1, self.iterations.start)

    def sources(self) -> dict[Source, int]:
        """How many snapshots come from where."""
        return {source: sum(fetch.source is source for fetch in self.fetches) for source in Source}


def plan_recovery(
    reports: Sequence[Report], until: int | None, roll_back: Collection[int] | None = None
) -> RecoveryPlan:
    """The plan that runs the fewest iterations again.

    Args:
        reports: one of each rank of the job.
        until: the iteration to reach, nothing for the first dense state of the plan itself.
        roll_back: the stages that replay, together; nothing for all.

    Raises:
        RecoveryError: no run of snapshots is there for every rank; says which are.
    """
    stages = {report.rank: report.stage for report in reports}
    if roll_back is not None:
        stages = {rank: stage for rank, stage in stages.items() if stage in roll_back}
    return _plan(reports, until, stages)


def plan_from_replicas(reports: Sequence[Report], until: int, ranks: Collection[int]) -> RecoveryPlan | None:
    """The plan in which ``ranks`` take ``state@until`` from live ones that have the same; nothing is made again.

    Args:
        reports: one of each rank of the job.
        until: the iteration to reach.
        ranks: those that lost their state.

    Returns:
        Nothing if one of them has no such rank left.
    """
    stages = {report.rank: report.stage for report in reports}
    fetches, runs = list[Fetch](), dict[int, RecoverableRun]()
    for rank in sorted(ranks):
        holder = next((report for report in reports if rank in report.stands_for), None)
        if holder is None:
            return None
        fetches.append(Fetch(rank, until, holder.rank, Source.REPLICA))
        runs[stages[rank]] = RedoRun(until, np.full(holder.stands_for[rank], until), until)
    if not fetches:
        return None
    return RecoveryPlan(until, until, until, until, runs, tuple(fetches), frozenset(ranks), until)


def plan_redo(reports: Sequence[Report], until: int, ranks: Collection[int]) -> RecoveryPlan | None:
    """The plan in which ``ranks`` alone come to ``state@until``, by updates that they make again; others keep theirs.

    Args:
        reports: one of each rank of the job.
        until: the iteration to reach.
        ranks: those that lost their state.

    Returns:
        Nothing if copies of their gradients do not reach up to there.
    """
    try:
        held, usable, restored = _found(
            reports, {report.rank: report.stage for report in reports if report.rank in ranks}
        )
    except RecoveryError:
        return None
    plan = _by_redo(held, usable, until, restored, with_dense=True)
    return plan if plan is not None and not plan.iterations else None


def _plan(reports: Sequence[Report], until: int | None, stages: Mapping[int, int]) -> RecoveryPlan:
    """For the ranks in ``stages``, which restore their state together.

    Raises:
        RecoveryError: no run of snapshots is there for every one of them.
    """
    held, usable, ranks = _found(reports, stages)
    plans = [
        _by_redo(held, usable, until, ranks), _by_replay(held, usable, until, ranks),
        _by_versions(held, usable, until, stages),
    ]  # fmt: skip
    possible = [plan for plan in plans if plan is not None]
    if not possible:
        raise RecoveryError(_missing(usable, until))
    return min(possible, key=lambda plan: (-plan.until, len(plan.iterations)))


def _found(reports: Sequence[Report], stages: Mapping[int, int]) -> tuple[Held, Usable, frozenset[int]]:
    """Where snapshots of the ranks in ``stages`` are, which of them all ranks of a stage have, and these ranks."""
    everything = {rank: its for rank, its in _by_owner(reports).items() if rank in stages}
    usable = {stage: _usable(stage, stages, everything) for stage in sorted(set(stages.values()))}
    held = {
        rank: {at: _with_all_of(usable[stages[rank]].get(at), places) for at, places in its.items()}
        for rank, its in everything.items()
    }
    return held, usable, frozenset(stages)


def _with_all_of(contents: Contents | None, places: list[Place]) -> list[Place]:
    """Where all of ``contents`` is: files may leave operators out, and memory may have given back parts."""
    if contents is None:
        return places
    return [one for one in places if not (_lacks(contents_of(one[2].contents)) & ~_lacks(contents)).any()]


Usable = Mapping[int, Mapping[int, Contents]]
"""By stage and iteration, what the snapshots hold that are there for every rank of it."""


def _by_replay(held: Held, usable: Usable, until: int | None, ranks: frozenset[int]) -> RecoveryPlan | None:
    """From the newest iteration at which a recoverable run of every stage begins."""
    runs = {stage: {run.first: run for run in recoverable_runs(its, until)} for stage, its in usable.items()}
    everywhere = set.intersection(*(set(of_stage) for of_stage in runs.values()))
    for first in sorted(everywhere, reverse=True):
        chosen = {stage: of_stage[first] for stage, of_stage in runs.items()}
        dense_at = max(run.last for run in chosen.values())
        # Up to there every rank needs every snapshot: what a frozen operator's gradient would have said is in them.
        if all(set(range(first, dense_at + 1)) <= set(snapshots) for snapshots in usable.values()):
            end = _state_at(held, dense_at) if until is None else until
            begins = _state_at(held, first)
            return RecoveryPlan(first, dense_at, end, begins, chosen, _fetches(held, first, end, dense_at), ranks)
    return None


def _by_redo(
    held: Held, usable: Usable, until: int | None, ranks: frozenset[int], *, with_dense: bool = False
) -> RecoveryPlan | None:
    """To the newest iteration that gradients of every stage lead to, or a dense snapshot holds."""
    runs = {
        stage: {run.last: run for run in redo_runs(its, until, with_dense=with_dense)} for stage, its in usable.items()
    }
    everywhere = set.intersection(*(set(of_stage) for of_stage in runs.values()))
    for last in sorted(everywhere, reverse=True):
        chosen = {stage: of_stage[last] for stage, of_stage in runs.items()}
        first = min(run.first for run in chosen.values())
        if all(set(range(first, last + 1)) <= set(its) for its in usable.values()):
            reaches = _state_at(held, last)
            end = reaches if until is None else until
            begins, fetches = _state_at(held, first), _fetches(held, first, end, last)
            return RecoveryPlan(first, last, end, begins, chosen, fetches, ranks, reaches)
    return None


def _by_versions(held: Held, usable: Usable, until: int | None, stages: Mapping[int, int]) -> RecoveryPlan | None:
    """From the newest snapshot that every stage has, and of what that leaves out the newest versions before it."""
    if not any(leaves_out(saved) for its in usable.values() for saved in its.values()):
        return None
    runs = {stage: {run.last: run for run in version_runs(its, until)} for stage, its in usable.items()}
    everywhere = set.intersection(*(set(of_stage) for of_stage in runs.values()))
    if not everywhere:
        return None
    last = max(everywhere)
    chosen = {stage: of_stage[last] for stage, of_stage in runs.items()}
    fetches = tuple(
        _nearest(held, owner, iteration)
        for owner, stage in sorted(stages.items())
        for iteration in sorted(chosen[stage].snapshots)
    )
    first, reaches = min(run.first for run in chosen.values()), _state_at(held, last)
    end = reaches if until is None else until
    if any(run.is_redone for run in chosen.values()):
        begins = _state_at(
            {owner: held[owner] for owner, stage in stages.items() if chosen[stage].first == first}, first
        )
        return RecoveryPlan(first, last, end, begins, chosen, fetches, frozenset(stages), reaches)
    return RecoveryPlan(first, last, end, reaches, chosen, fetches, frozenset(stages))


def _state_at(held: Held, iteration: int) -> int:
    """The iteration whose state the snapshots of ``iteration`` hold."""
    return max(holding.state for places in held.values() for _, _, holding in places[iteration])


Held = Mapping[int, Mapping[int, list[Place]]]
"""By owner and iteration: where a snapshot is."""


def _by_owner(reports: Sequence[Report]) -> Held:
    held: dict[int, dict[int, list[Place]]] = {report.rank: {} for report in reports}
    for report in reports:
        for holding in report.holdings:
            if holding.owner in held:
                held[holding.owner].setdefault(holding.iteration, []).append((holding.source, report.rank, holding))
    in_memory = {
        owner: {at: [one for one in its if one[0] is not Source.FILE] for at, its in places.items()}
        for owner, places in held.items()
    }
    for place in places_in_sums({report.rank: report.summed for report in reports}, in_memory):
        if place[2].owner in held:
            held[place[2].owner].setdefault(place[2].iteration, []).append(place)
    return held


def _usable(stage: int, stages: Mapping[int, int], held: Held) -> dict[int, Contents]:
    """Snapshots that are there for every rank of a stage, taken under one schedule."""
    ranks = [rank for rank, its_stage in stages.items() if its_stage == stage]
    common = set.intersection(*(set(held[rank]) for rank in ranks))
    usable = {}
    for iteration in sorted(common):
        schedules = {holding.schedule for rank in ranks for _, _, holding in held[rank][iteration]}
        if len(schedules) == 1:  # otherwise some are left over from another run
            usable[iteration] = _held_by_all([held[rank][iteration] for rank in ranks])
    return usable


def _held_by_all(places: Sequence[Sequence[Place]]) -> Contents:
    """What every rank's snapshot holds, in whichever place holds the most of it."""
    contents: Contents | None = None
    for of_rank in places:
        most = min((contents_of(one.contents) for _, _, one in of_rank), key=_left_out)
        contents = most if contents is None else np.where(_lacks(most), most, contents)
    assert contents is not None
    return contents


def _lacks(contents: Contents) -> npt.NDArray[np.bool_]:
    return (contents == Saved.OMITTED) | (contents == Saved.NOTHING)


def _left_out(contents: Contents) -> int:
    return int(_lacks(contents).sum())


def _fetches(held: Held, first: int, until: int, dense_at: int) -> tuple[Fetch, ...]:
    """Everything up to ``dense_at``, and beyond it what every rank has in memory, to check the replay with."""
    fetches = []
    for iteration in range(first, max(until, dense_at) + 1):
        if iteration > dense_at and not all(iteration in its for its in held.values()):
            continue
        for owner in held:
            fetches.append(_nearest(held, owner, iteration))
    return tuple(fetches)


def _nearest(held: Held, owner: int, iteration: int) -> Fetch:
    """From where it comes the quickest."""
    source, holder, holding = min(held[owner][iteration], key=lambda place: (place[0], place[1] != owner, place[1]))
    return Fetch(owner, iteration, holder, source, holding.sum)


def _missing(usable: Mapping[int, Mapping[int, Contents]], until: int | None) -> str:
    target = "a dense state" if until is None else f"iteration {until}"
    stages = defaultdict(list)
    for stage, snapshots in usable.items():
        stages[_ranges(sorted(snapshots)) or "none"].append(str(stage))
    there = "; ".join(f"stage {', '.join(numbers)}: {ranges}" for ranges, numbers in stages.items())
    return (
        f"{target} cannot be recovered: no run of snapshots that holds every operator is there for all ranks. "
        f"Whole snapshots, by iteration: {there}. Start again from a dense checkpoint (--load), or from an older window"
    )


def _ranges(iterations: Sequence[int]) -> str:
    """``1 to 3, 7``."""
    ranges: list[list[int]] = []
    for iteration in iterations:
        if ranges and ranges[-1][1] == iteration - 1:
            ranges[-1][1] = iteration
        else:
            ranges.append([iteration, iteration])
    return ", ".join(f"{a} to {b}" if a < b else str(a) for a, b in ranges)
