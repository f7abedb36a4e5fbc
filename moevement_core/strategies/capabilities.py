"""Capabilities that only some strategies have; the engine asks for them with ``isinstance``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from moevement_core.policy.partial_experts import LostTokens
from moevement_core.policy.popularity import Scores
from moevement_core.policy.recoverable import RecoverableRun
from moevement_core.policy.schedule import Schedule


class CountsTokens(ABC):
    """Strategy that uses the tokens that routers send to each operator."""

    @abstractmethod
    def observe(self, counts: Scores) -> None:
        """Count the tokens that routers sent to each operator.

        Args:
            counts: tokens of one or more iterations, summed over all ranks of the stage, float64 ``[operators]``.
        """


class LosesUpdates(CountsTokens):
    """Strategy after whose recovery some operators are older than others, so that updates are lost.

    Every snapshot of such a job also contains the result of ``Strategy.learned``.
    """

    @abstractmethod
    def caution(self) -> str | None:
        """Return a warning to log before training begins; None if snapshots hold all experts."""

    @abstractmethod
    def restored(self, run: RecoverableRun, learned: Mapping[int, Any], tokens_of_run: int | None = None) -> LostTokens:
        """Set this strategy back to the last snapshot of ``run``, and count the tokens whose updates are lost.

        The session calls this method after a recovery.

        Args:
            run: run of snapshots that the stage has restored. Some of its operators may be older than others.
            learned: results of ``Strategy.learned`` that these snapshots contain, by iteration.
            tokens_of_run: tokens that each layer routes in the whole run (:attr:`Counts.tokens_of_run`).

        Returns:
            Tokens whose updates are lost, by expert of the stage.
        """

    @abstractmethod
    def schedules_after_rollback(
        self, schedules: Sequence[Schedule], iteration: int, history: int
    ) -> Sequence[Schedule]:
        """Return the schedules of the job after it went back to ``iteration``; called after :meth:`restored`.

        Args:
            schedules: schedules that were in force or decided on, the oldest first.
            iteration: iteration whose state is restored; later snapshots are dropped.
            history: number that no earlier recovery of the job had.
        """


class BoostsExperts(ABC):
    """Strategy that gives extra capacity to experts whose updates were lost (``--moevement-capacity-boost``)."""

    @property
    @abstractmethod
    def tokens_owed(self) -> int:
        """Lost tokens of all experts of the stage, less those that extra capacity has admitted since their loss."""

    @abstractmethod
    def boosted_experts(self) -> Collection[str]:
        """Return the experts that get extra capacity in the next iteration."""

    @abstractmethod
    def observe_extra_tokens(self, tokens: Scores) -> None:
        """Subtract from :attr:`tokens_owed` the tokens that experts accepted only because of extra capacity.

        Args:
            tokens: tokens since the last call, summed over all ranks of the stage, float64 ``[operators]``.
        """


class ChoosesRecovery(ABC):
    """Strategy that chooses between ways to recover."""

    @abstractmethod
    def first_without(self, start: int, most: int) -> Schedule | None:
        """Return the schedule to use if host memory is too small for ``Strategy.first``; None without an alternative.

        Args:
            start: iteration whose state the job begins from.
            most: largest possible number of slots in a window.
        """

    @abstractmethod
    def reason_prefix(self, schedule: Schedule) -> str:
        """Return the text with which ``Proposal.why`` begins if ``schedule`` is proposed; empty without a choice."""
