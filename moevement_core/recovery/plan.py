"""Plan of a recovery: which snapshots it loads, and which ranks provide them.

Every rank computes the same plan from the reports of all ranks.

Stages that roll back together replay in step, so they begin at the same iteration: the newest one at which
a recoverable run begins in every stage (MoEvement section 3.3; the paper's global path).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from moevement_core.errors import RecoveryError
from moevement_core.policy.recoverable import RecoverableRun, recoverable_runs
from moevement_core.policy.redo import RedoRun, redo_runs
from moevement_core.policy.schedule import Contents, Saved
from moevement_core.policy.versions import leaves_out, version_runs
from moevement_core.recovery.holdings import Fetch, Holding, Place, Source
from moevement_core.recovery.sums import Summed, places_in_sums
from moevement_core.snapshot.snapshot import contents_of


@dataclass(frozen=True, slots=True)
class Report:
    """Report of one rank on its snapshots and logs. A report does not prove that the bytes are intact.

    Ranks check the bytes of a snapshot only when they fetch it.
    """

    rank: int
    stage: int
    holdings: tuple[Holding, ...]
    logged: tuple[int, ...] = ()
    """Iterations for which the rank's boundary log is complete."""
    outcomes: tuple[int, ...] = ()
    """Iterations of recent steps whose outcomes (skipped or not, gradient norm, losses) the rank has recorded."""
    replica: int = 0
    """Number of the rank's model replica; the ranks of a replica have the same number in all stages."""
    summed: tuple[Summed, ...] = ()
    """Blocks of parity that the rank holds."""
    stands_for: Mapping[int, int] = field(default_factory=dict)
    """Failed ranks whose state is live on this rank. The values are the numbers of operators of their stages."""
    arithmetic: str = ""
    """Text that names every property of this process which can change the bits of a result, such as library versions.

    See :mod:`moevement_core.util.arithmetic`.
    """
    is_repeatable: bool = True
    """True if this process computes the same bits when it repeats a computation."""
    placed_since: int | None = None
    """Iteration since which no rank has moved to another node or device, as far as this rank knows.

    None if this rank has taken part in no iteration.
    """


@dataclass(frozen=True, slots=True, eq=False)
class RecoveryPlan:
    """Plan of one recovery: snapshots to fetch, and iterations to redo or to execute again."""

    first: int
    """Iteration of the oldest snapshot that the recovery loads."""
    dense_at: int
    """First iteration at which every operator of every stage is active."""
    until: int
    """Iteration whose state the recovery is to reach."""
    begins: int
    """Iteration after which the recovery repeats updates or iterations.

    It is the iteration whose state the snapshots ``SS_first`` hold. The exception is a recovery that loads older
    versions of some operators and redoes none: it continues from the state in the newest snapshot.
    """
    runs: Mapping[int, RecoverableRun]
    """Recoverable run of each stage."""
    fetches: tuple[Fetch, ...]
    """Fetches of all snapshots that the recovery loads or compares with, in the order of their iterations."""
    ranks: frozenset[int] = frozenset()
    """Ranks whose state is restored: all ranks of the stages in :attr:`runs`, or the failed ranks alone."""
    redone_until: int | None = None
    """Iteration up to which updates are repeated from gradients; later iterations are executed again.

    None if all iterations are executed again.
    """

    @property
    def iterations(self) -> range:
        """Iterations that are executed again."""
        return range((self.begins if self.redone_until is None else self.redone_until) + 1, self.until + 1)

    @property
    def redone(self) -> range:
        """Iterations whose updates are repeated from logged gradients, without executing the iterations again."""
        return range(self.begins + 1, self.iterations.start)

    def sources(self) -> dict[Source, int]:
        """Return the number of snapshots from each source."""
        return {source: sum(fetch.source is source for fetch in self.fetches) for source in Source}


def plan_recovery(
    reports: Sequence[Report], until: int | None, roll_back: Collection[int] | None = None
) -> RecoveryPlan:
    """Return the plan that executes the fewest iterations again.

    Args:
        reports: report of each rank of the job.
        until: iteration to reach; None for the newest dense state that snapshots lead to.
        roll_back: stages that replay together; None for all.

    Raises:
        RecoveryError: no recoverable run is available for every rank; the message lists the available snapshots.
    """
    stages = {report.rank: report.stage for report in reports}
    if roll_back is not None:
        stages = {rank: stage for rank, stage in stages.items() if stage in roll_back}
    return _plan(reports, until, stages)


def plan_from_replicas(reports: Sequence[Report], until: int, ranks: Collection[int]) -> RecoveryPlan | None:
    """Return the plan in which ``ranks`` take ``state@until`` from live replicas, and repeat nothing.

    Args:
        reports: report of each rank of the job.
        until: iteration to reach.
        ranks: ranks that lost their state.

    Returns:
        Plan; None if a rank has no live replica, or ``ranks`` is empty.
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
    return RecoveryPlan(
        first=until,
        dense_at=until,
        until=until,
        begins=until,
        runs=runs,
        fetches=tuple(fetches),
        ranks=frozenset(ranks),
        redone_until=until,
    )


def plan_redo(reports: Sequence[Report], until: int, ranks: Collection[int]) -> RecoveryPlan | None:
    """Return the plan in which ``ranks`` alone rebuild ``state@until`` by repeated updates; others keep their state.

    Args:
        reports: report of each rank of the job.
        until: iteration to reach.
        ranks: ranks that lost their state.

    Returns:
        Plan; None if the available copies of gradients do not reach ``until``.
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
    """Return the plan for the ranks in ``stages``, which restore their state together.

    Raises:
        RecoveryError: no recoverable run is available for all of these ranks.
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
    """Return the places of snapshots of the ranks in ``stages``, the usable snapshots by stage, and these ranks."""
    everything = {rank: snapshots for rank, snapshots in _by_owner(reports).items() if rank in stages}
    usable = {stage: _usable(stage, stages, everything) for stage in sorted(set(stages.values()))}
    held = {
        rank: {at: _with_all_of(usable[stages[rank]].get(at), places) for at, places in snapshots.items()}
        for rank, snapshots in everything.items()
    }
    return held, usable, frozenset(stages)


def _with_all_of(contents: Contents | None, places: list[Place]) -> list[Place]:
    """Return the places whose snapshots have all of ``contents``.

    The snapshot at one place may lack operators that another place has: files may leave operators out, and a rank may
    have freed parts of a snapshot in memory.
    """
    if contents is None:
        return places
    return [place for place in places if not (_lacks(contents_of(place[2].contents)) & ~_lacks(contents)).any()]


Usable = Mapping[int, Mapping[int, Contents]]
"""Contents of the snapshots that are available for every rank of a stage, by stage and iteration."""


def _by_replay(held: Held, usable: Usable, until: int | None, ranks: frozenset[int]) -> RecoveryPlan | None:
    """Return the plan that replays from the newest iteration at which a recoverable run begins in every stage."""
    runs = {
        stage: {run.first: run for run in recoverable_runs(snapshots, until)} for stage, snapshots in usable.items()
    }
    everywhere = set.intersection(*(set(of_stage) for of_stage in runs.values()))
    for first in sorted(everywhere, reverse=True):
        chosen = {stage: of_stage[first] for stage, of_stage in runs.items()}
        dense_at = max(run.last for run in chosen.values())
        # Up to the dense state, every rank needs every snapshot, because only snapshots have the new weights of frozen
        # operators.
        if all(set(range(first, dense_at + 1)) <= set(snapshots) for snapshots in usable.values()):
            end = _state_at(held, dense_at) if until is None else until
            begins = _state_at(held, first)
            return RecoveryPlan(
                first,
                dense_at,
                until=end,
                begins=begins,
                runs=chosen,
                fetches=_fetches(held, first, end, dense_at),
                ranks=ranks,
            )
    return None


def _by_redo(
    held: Held, usable: Usable, until: int | None, ranks: frozenset[int], *, with_dense: bool = False
) -> RecoveryPlan | None:
    """Return the plan that repeats updates up to the newest iteration for which every stage has gradients.

    A single dense snapshot restores the state without any update. Plans that use one come from this function only if
    ``with_dense`` is True, and from :func:`_by_replay` otherwise.
    """
    runs = {
        stage: {run.last: run for run in redo_runs(snapshots, until, with_dense=with_dense)}
        for stage, snapshots in usable.items()
    }
    everywhere = set.intersection(*(set(of_stage) for of_stage in runs.values()))
    for last in sorted(everywhere, reverse=True):
        chosen = {stage: of_stage[last] for stage, of_stage in runs.items()}
        first = min(run.first for run in chosen.values())
        if all(set(range(first, last + 1)) <= set(snapshots) for snapshots in usable.values()):
            reaches = _state_at(held, last)
            end = reaches if until is None else until
            begins, fetches = _state_at(held, first), _fetches(held, first, end, last)
            return RecoveryPlan(
                first,
                dense_at=last,
                until=end,
                begins=begins,
                runs=chosen,
                fetches=fetches,
                ranks=ranks,
                redone_until=reaches,
            )
    return None


def _by_versions(held: Held, usable: Usable, until: int | None, stages: Mapping[int, int]) -> RecoveryPlan | None:
    """Return the plan that loads the newest snapshot of every stage.

    Operators that this snapshot leaves out are loaded in older versions, from older snapshots.
    """
    if not any(leaves_out(saved) for snapshots in usable.values() for saved in snapshots.values()):
        return None
    runs = {stage: {run.last: run for run in version_runs(snapshots, until)} for stage, snapshots in usable.items()}
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
        return RecoveryPlan(
            first,
            dense_at=last,
            until=end,
            begins=begins,
            runs=chosen,
            fetches=fetches,
            ranks=frozenset(stages),
            redone_until=reaches,
        )
    return RecoveryPlan(
        first, dense_at=last, until=end, begins=reaches, runs=chosen, fetches=fetches, ranks=frozenset(stages)
    )


def _state_at(held: Held, iteration: int) -> int:
    """Return the iteration whose state ``SS_iteration`` holds; see ``Header.state``."""
    return max(holding.state for places in held.values() for _, _, holding in places[iteration])


Held = Mapping[int, Mapping[int, list[Place]]]
"""Places of each snapshot, by owner and iteration."""


def _by_owner(reports: Sequence[Report]) -> Held:
    held: dict[int, dict[int, list[Place]]] = {report.rank: {} for report in reports}
    for report in reports:
        for holding in report.holdings:
            if holding.owner in held:
                held[holding.owner].setdefault(holding.iteration, []).append((holding.source, report.rank, holding))
    in_memory = {
        owner: {at: [place for place in candidates if place[0] is not Source.FILE] for at, candidates in places.items()}
        for owner, places in held.items()
    }
    for place in places_in_sums({report.rank: report.summed for report in reports}, in_memory):
        if place[2].owner in held:
            held[place[2].owner].setdefault(place[2].iteration, []).append(place)
    return held


def _usable(stage: int, stages: Mapping[int, int], held: Held) -> dict[int, Contents]:
    """Return, by iteration, the operators and states that the snapshots of every rank of ``stage`` contain.

    An iteration is left out if a rank has no snapshot of it, or if snapshots of it follow different schedules.
    """
    ranks = [rank for rank, rank_stage in stages.items() if rank_stage == stage]
    common = set.intersection(*(set(held[rank]) for rank in ranks))
    usable = {}
    for iteration in sorted(common):
        schedules = {holding.schedule for rank in ranks for _, _, holding in held[rank][iteration]}
        if len(schedules) == 1:  # Otherwise, some snapshots are left over from other schedules.
            usable[iteration] = _held_by_all([held[rank][iteration] for rank in ranks])
    return usable


def _held_by_all(places: Sequence[Sequence[Place]]) -> Contents:
    """Return the contents that the snapshots of all ranks have in common.

    A snapshot may be in several places, and lack some operators in one of them. This function looks only at the place
    where the snapshot lacks the fewest operators.
    """
    contents: Contents | None = None
    for of_rank in places:
        most = min((contents_of(holding.contents) for _, _, holding in of_rank), key=_left_out)
        contents = most if contents is None else np.where(_lacks(most), most, contents)
    assert contents is not None
    return contents


def _lacks(contents: Contents) -> npt.NDArray[np.bool_]:
    return (contents == Saved.OMITTED) | (contents == Saved.NOTHING)


def _left_out(contents: Contents) -> int:
    return int(_lacks(contents).sum())


def _fetches(held: Held, first: int, until: int, dense_at: int) -> tuple[Fetch, ...]:
    """Return the fetches of all snapshots up to ``dense_at``, and of later snapshots, which check the replay.

    A later snapshot is fetched only if the snapshots of all ranks are available for its iteration.
    """
    fetches = []
    for iteration in range(first, max(until, dense_at) + 1):
        if iteration > dense_at and not all(iteration in snapshots for snapshots in held.values()):
            continue
        for owner in held:
            fetches.append(_nearest(held, owner, iteration))
    return tuple(fetches)


def _nearest(held: Held, owner: int, iteration: int) -> Fetch:
    """Return the fetch of a snapshot from the place that can provide it most quickly."""
    source, holder, holding = min(held[owner][iteration], key=lambda place: (place[0], place[1] != owner, place[1]))
    return Fetch(owner, iteration, holder=holder, source=source, sum=holding.sum)


def _missing(usable: Mapping[int, Mapping[int, Contents]], until: int | None) -> str:
    target = "a dense state" if until is None else f"iteration {until}"
    stages = defaultdict(list)
    for stage, snapshots in usable.items():
        stages[_ranges(sorted(snapshots)) or "none"].append(str(stage))
    there = "; ".join(f"stage {', '.join(numbers)}: {ranges}" for ranges, numbers in stages.items())
    return (
        f"{target} cannot be recovered: no run of snapshots with every operator is available for all ranks. Iterations "
        f"with snapshots of all ranks: {there}. Start again from a dense checkpoint (--load), or from an older window"
    )


def _ranges(iterations: Sequence[int]) -> str:
    """Return iterations as text, such as ``1 to 3, 7``."""
    ranges: list[list[int]] = []
    for iteration in iterations:
        if ranges and ranges[-1][1] == iteration - 1:
            ranges[-1][1] = iteration
        else:
            ranges.append([iteration, iteration])
    return ", ".join(f"{a} to {b}" if a < b else str(a) for a, b in ranges)
