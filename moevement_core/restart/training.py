"""Interface of a trainer that restarts in place, and the settings with which it is guarded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moevement_core.rendezvous.resizing import Grid
from moevement_core.restart.faults import Fault


@dataclass(frozen=True)
class GuardSettings:
    """Settings for the guard of a rank while it trains."""

    hang_s: float
    """Limit in seconds: if the main thread runs no Python code for longer, the rank counts as hung."""
    interval_s: float = 0.5
    """Seconds between two checks of the monitoring thread."""
    faults: Sequence[Fault] = ()
    """Faults to inject, for drills."""
    devices: tuple[str, ...] = ()
    """Identities of the accelerators that this process sees (:func:`~moevement_core.device.visible_devices`)."""


class Training(ABC):
    """Interface of a trainer that restarts in place. The main thread calls all methods."""

    @property
    @abstractmethod
    def watching(self) -> GuardSettings:
        """Settings for the guard, and the devices of this process."""

    @abstractmethod
    def enter(self, store: Any) -> Any:
        """Make process groups, recover, and train to the end; return the result of the job.

        The process calls this once in each generation, with the generation's ``RANK`` and ``WORLD_SIZE`` in the
        environment. An exception counts as a failure, and leads to the next generation.

        Args:
            store: store for ``torch.distributed.init_process_group``, with separate keys for each generation.
        """

    @property
    def grid(self) -> Grid | None:
        """Layout of the ranks of an elastic job, and the sizes that the job may have; None for a job of fixed size."""
        return None

    @property
    def blocks(self) -> tuple[int, ...]:
        """Sizes of the groups of consecutive ranks that should share a node, because they communicate in every layer.

        Sizes of 1 are left out.
        """
        return ()

    def take_rank(self, rank: int, world: int, device: int | None) -> None:
        """Take a rank for the next generation; called before :meth:`enter`, outside of the guard.

        Args:
            rank: rank of this process.
            world: number of ranks of the job.
            device: local number of the rank's device; None: this process knows it already.
        """

    @abstractmethod
    def interrupted(self) -> None:
        """Clean up what an interruption has left half done; called between generations, without any process groups."""

    def ended(self) -> None:
        """Finish the job in this process; called once, when all ranks have reached the end of training."""

    @property
    @abstractmethod
    def has_begun(self) -> bool:
        """True if training has begun, so that this process has state to keep through a failure."""

    @property
    @abstractmethod
    def iteration(self) -> int:
        """Last iteration that this rank has committed."""

    @property
    @abstractmethod
    def resumed_in(self) -> int:
        """Newest generation in which this rank recovered from all failures and resumed training; -1 for none."""
