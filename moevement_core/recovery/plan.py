"""Which snapshots a recovery starts from and who has them: plain data, from what the ranks report.

When all stages roll back together they replay in step, so they begin at the same iteration: the newest one at which a
recoverable run of every stage begins (MoEvement section 3.3; the paper's global path).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from moevement_core.errors import RecoveryError
from moevement_core.policy.recoverable import RecoverableRun, recoverable_runs
from moevement_core.policy.schedule import Contents
from moevement_core.snapshot.snapshot import contents_of


class Source(IntEnum):
    """Where a snapshot is, the quickest first."""

    MEMORY = 0
    """Host memory of the rank that took it."""
    PEER = 1
    """Host memory of a peer."""
    FILE = 2


@dataclass(frozen=True, slots=True)
class Holding:
    """A whole snapshot that a rank can hand out."""

    owner: int
    """The rank that took it."""
    iteration: int
    state: int
    """The iteration whose state it holds."""
    schedule: str
    contents: str
    source: Source


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank has, after it checked every byte of it."""

    rank: int
    stage: int
    holdings: tuple[Holding, ...]
    logged: tuple[int, ...] = ()
    """Iterations of which it has everything that it sent over its stage's boundaries."""
    outcomes: Mapping[int, Any] = field(default_factory=dict)
    """What came of recent iterations, by their number."""
    replica: int = 0
    """A name that ranks of one model replica, through all stages, have in common."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """A snapshot of ``owner`` that ``holder`` hands out, to itself if it is the owner."""

    owner: int
    iteration: int
    holder: int
    source: Source


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

    @property
    def iterations(self) -> range:
        """Those that are run again."""
        return range(self.begins + 1, self.until + 1)

    def sources(self) -> dict[Source, int]:
        """How many snapshots come from where."""
        return {source: sum(fetch.source is source for fetch in self.fetches) for source in Source}


def plan_recovery(
    reports: Sequence[Report], until: int | None, roll_back: Collection[int] | None = None
) -> RecoveryPlan:
    """The plan that replays least.

    Args:
        reports: one of each rank of the job.
        until: the iteration to reach, nothing for the first dense state of the plan itself.
        roll_back: the stages that replay, together; nothing for all.

    Raises:
        RecoveryError: no run of snapshots is there for every rank; says which are.
    """
    stages = {report.rank: report.stage for report in reports}
    held = _by_owner(reports)
    roll_back = set(stages.values()) if roll_back is None else roll_back
    held = {rank: its for rank, its in held.items() if stages[rank] in roll_back}
    usable = {stage: _usable(stage, stages, held) for stage in sorted(roll_back)}
    runs = {
        stage: {run.first: run for run in recoverable_runs(snapshots, until)} for stage, snapshots in usable.items()
    }
    everywhere = set.intersection(*(set(of_stage) for of_stage in runs.values()))
    for first in sorted(everywhere, reverse=True):
        chosen = {stage: of_stage[first] for stage, of_stage in runs.items()}
        dense_at = max(run.last for run in chosen.values())
        # Up to there every rank needs every snapshot: what a frozen operator's gradient would have said is in them.
        if all(set(range(first, dense_at + 1)) <= set(snapshots) for snapshots in usable.values()):
            end = _state_at(held, dense_at) if until is None else until
            begins = _state_at(held, first)
            return RecoveryPlan(first, dense_at, end, begins, chosen, _fetches(held, first, end, dense_at))
    raise RecoveryError(_missing(usable, until))


def _state_at(held: Held, iteration: int) -> int:
    """The iteration whose state the snapshots of ``iteration`` hold."""
    return max(holding.state for places in held.values() for _, _, holding in places[iteration])


Held = Mapping[int, Mapping[int, list[tuple[Source, int, Holding]]]]
"""By owner and iteration: where a snapshot is."""


def _by_owner(reports: Sequence[Report]) -> Held:
    held: dict[int, dict[int, list[tuple[Source, int, Holding]]]] = {report.rank: {} for report in reports}
    for report in reports:
        for holding in report.holdings:
            if holding.owner in held:
                held[holding.owner].setdefault(holding.iteration, []).append((holding.source, report.rank, holding))
    return held


def _usable(stage: int, stages: Mapping[int, int], held: Held) -> dict[int, Contents]:
    """Snapshots that are there for every rank of a stage, taken under one schedule."""
    ranks = [rank for rank, its_stage in stages.items() if its_stage == stage]
    common = set.intersection(*(set(held[rank]) for rank in ranks))
    usable = {}
    for iteration in sorted(common):
        found = {(holding.schedule, holding.contents) for rank in ranks for _, _, holding in held[rank][iteration]}
        if len(found) == 1:  # otherwise some are left over from another run
            ((_, contents),) = found
            usable[iteration] = contents_of(contents)
    return usable


def _fetches(held: Held, first: int, until: int, dense_at: int) -> tuple[Fetch, ...]:
    """Everything up to ``dense_at``, and beyond it what every rank has in memory, to check the replay with."""
    fetches = []
    for iteration in range(first, max(until, dense_at) + 1):
        there = [(owner, held[owner].get(iteration)) for owner in held]
        if iteration > dense_at and not all(places for _, places in there):
            continue
        for owner, places in there:
            source, holder, _ = min(places or [], key=lambda place: (place[0], place[1] != owner, place[1]))
            fetches.append(Fetch(owner, iteration, holder, source))
    return tuple(fetches)


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
