"""What a way of checkpointing has to say of itself, to the engine and to the binding.

A strategy is pure: it sees counts, measurements and what snapshots hold, and answers with schedules and restore points.
Every rank of a pipeline stage has an equal one and asks it the same, so all come to the same answer by themselves.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from moevement_core.operators import OperatorTable
from moevement_core.overhead.cap import Evidence, factor
from moevement_core.policy.partial_experts import LostTokens
from moevement_core.policy.popularity import Ordering, Scores
from moevement_core.policy.recoverable import RecoverableRun
from moevement_core.policy.runs import open_starts, restore_points
from moevement_core.policy.schedule import Contents, Schedule
from moevement_core.policy.window import Budget

LEAST_COPIED = 0.25
"""Share of what copies from the device can move that is left to snapshots, however much the boundary log takes."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a rank has measured of itself."""

    iteration_s: float
    """Seconds of an iteration beside which nothing is saved; of all iterations while there is no such one."""
    d2h_bytes_per_s: float
    replication_bytes_per_s: float
    """That snapshots may take, all peers together."""
    replicas: int
    disk_bytes_per_s: float = float("inf")
    """At which snapshots were written to disk."""
    delay_s: float = 0.0
    """By which the snapshots of the last window delayed its iterations, stalls among it."""
    logged_bytes: float = 0.0
    """Bytes of an iteration that the boundary log copies from the device."""
    cost: Evidence | None = None
    """What saving costs training now, the same on all ranks; None before it is measured."""

    @property
    def copies(self) -> Budget:
        """What copies from device to host can move in an iteration beside the boundary log, which leaves at least
        :data:`LEAST_COPIED` of it.
        """
        logged_bytes = min(self.logged_bytes, (1 - LEAST_COPIED) * self.d2h_bytes_per_s * self.iteration_s)
        return Budget(self.iteration_s, self.d2h_bytes_per_s, replicas=0, reserved_d2h_bytes=logged_bytes)

    @property
    def link_bytes(self) -> float:
        """Bytes of snapshots that links carry to all peers in an iteration; infinite where there are no peers."""
        return self.replication_bytes_per_s * self.iteration_s / self.replicas if self.replicas else math.inf

    def bytes_to_save(self, now_bytes: float, cap: float) -> float:
        """Return the bytes that an iteration may save: what links carry, and what the cap on overhead leaves.

        Args:
            now_bytes: bytes that an iteration saves now, a mean over a window.
            cap: share of training time that saving may cost.
        """
        return min(self.link_bytes, now_bytes * factor(self.cost, cap))


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a strategy wants from the next window on."""

    schedules: Sequence[Schedule]
    """The preferred one first; the first that fits into host memory is taken. Where they start is not decided yet."""
    is_change: bool
    """Whether the first is another one than that in force."""
    reorders: bool = False
    """Whether it saves operators in another order."""
    why: str = ""
    """For who runs the job, where there was a choice between ways to recover: which it is, and from what numbers."""


class Strategy(ABC):
    """Of one pipeline stage.

    Args:
        table: the operators of the stage.
    """

    name: ClassVar[str]
    rolls_back_all: ClassVar[bool] = False
    """Whether every rank goes back to the restore point after a loss; otherwise those stages alone that lost state."""
    to_disk_alone: ClassVar[bool] = False
    """Whether only what is on disk counts: no peer is given a copy."""
    loses_updates: ClassVar[bool] = False
    """Whether a recovery may leave operators at older versions; what is learned travels with every snapshot then."""
    is_tuned: ClassVar[bool] = False
    """Whether its window is measured again and again; otherwise once."""
    sizes_are_iterations: ClassVar[bool] = True
    """Whether :meth:`wanted_sizes` are of windows, of which ranks agree on so many iterations at most."""
    paces_copies: ClassVar[bool] = False
    """Whether copies are sent while training leaves the network alone."""
    counts: Ordering | None = None
    """What routers are to count of the tokens of each expert; nothing if it is of no use here."""

    def __init__(self, table: OperatorTable) -> None:
        self.table = table
        self.settled = True
        """Whether the size of the window is no longer to be measured."""

    @abstractmethod
    def first(self, start: int, most: int) -> Schedule:
        """Until something is measured.

        Args:
            start: the iteration whose state the run begins from; the schedule holds it when that iteration is over.
            most: slots that a window may have: operators of the stage that has the most.
        """

    def first_without(self, start: int, most: int) -> Schedule | None:
        """Returns what takes the place of :meth:`first` where host memory has no room for that; None: nothing does."""
        return None

    def restore_points(self, held: Mapping[int, Contents], until: int | None = None) -> Iterator[RecoverableRun]:
        """What a state can be restored from, the newest first.

        Args:
            held: what each snapshot holds that is there, by iteration.
            until: the iteration that is to be recovered; later snapshots are not used.
        """
        return restore_points(held, until)

    def open_starts(self, held: Mapping[int, Contents], *, is_gapless: bool) -> Iterator[int]:
        """Where a restore point begins that is there or may still come with the next snapshots.

        Args:
            held: what each snapshot holds that is there, by iteration.
            is_gapless: whether the newest of them is the last one taken.
        """
        return open_starts(held, is_gapless=is_gapless)

    def observe(self, counts: Scores) -> None:  # noqa: B027, many have nothing to observe
        """Tokens that reached each operator in one iteration, float64 ``[operators]``, all ranks of the stage."""

    def short_of_tokens(self) -> Collection[str]:
        """Returns experts that are to be given room for more tokens in the next iteration."""
        return ()

    @property
    def tokens_owed(self) -> int:
        """Tokens that recoveries cost experts of the stage, and that such room has not let in yet."""
        return 0

    def let_in(self, tokens: Scores) -> None:  # noqa: B027
        """Tokens that only such room let in, in one iteration, float64 ``[operators]``, all ranks of the stage."""

    def wanted_sizes(self, now: Schedule, measured: Measured) -> tuple[int, ...]:
        """The windows that this rank would have, iterations; of all ranks the largest of each is taken."""
        return (now.size,)

    def propose(self, now: Schedule, sizes: tuple[int, ...] | None) -> Proposal:
        """What is to come into force at the next boundary.

        Args:
            now: in force, or decided on.
            sizes: what :meth:`wanted_sizes` gave, of all ranks; None where nothing was measured.
        """
        return Proposal([now], is_change=False)

    def way_of(self, schedule: Schedule) -> str:
        """Return how a proposal that keeps ``schedule`` begins to say why; empty where there is nothing to choose."""
        return ""

    def accept(self, proposal: Proposal) -> None:  # noqa: B027
        """It comes into force."""

    def caution(self) -> str | None:
        """Returns what who runs the job should know of it before training begins; None: nothing."""
        return None

    def restored(self, run: RecoverableRun, learned: Mapping[int, Any]) -> LostTokens:
        """The state is that of ``run``, of which some operators may be older than others.

        Only asked where :attr:`loses_updates`.

        Args:
            run: of the stage.
            learned: what :meth:`learned` gave when its snapshots were taken, by iteration.

        Returns:
            Tokens whose updates are lost, of the experts of the stage.
        """
        raise NotImplementedError

    def going_on(self, schedules: Sequence[Schedule], iteration: int, history: int) -> Sequence[Schedule]:
        """After :meth:`restored`: what is saved from now on, where the job has gone back to ``iteration``.

        Args:
            schedules: that were in force, or decided on; the oldest first.
            iteration: whose state is restored; later snapshots are no more.
            history: a number that no earlier recovery of the job had.
        """
        return schedules

    def learned(self) -> Any:
        """What a rank that joins the stage is given; plain data."""
        return None

    def adopt(self, learned: Any) -> None:  # noqa: B027
        """Go on from what :meth:`learned` of another rank of the stage gave."""
