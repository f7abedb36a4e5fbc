"""Job that this process takes part in; the replaced functions of Megatron share it.

Each process has one :class:`Process`. :mod:`megatron.moevement.activate` builds it and passes it to all replaced
functions, because Megatron passes no such object to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.moevement.binding import MegatronBinding
from megatron.moevement.elastic.formation import Formation, FormationSnapshots
from megatron.moevement.elastic.loads import RoutedLoads
from megatron.moevement.elastic.pieces import RankPosition
from megatron.moevement.elastic.resized import Resized
from megatron.moevement.elastic.survivor_state import SurvivorState
from megatron.moevement.restart import leftovers
from megatron.moevement.runtime.ledger import Ledger
from megatron.moevement.runtime.live import Live
from moevement_core.run.events import Event
from moevement_core.saving.identity import JobNames
from moevement_core.session.rejoin import Rejoined
from moevement_core.session.session import Session


@dataclass
class Job:
    """Job in this process, until :meth:`Process.start_over` replaces it by a new one."""

    live: Live = field(default_factory=Live)
    ledger: Ledger = field(init=False)
    binding: MegatronBinding = field(init=False)
    names: JobNames = field(default_factory=JobNames)
    session: Session | None = None
    """Fault tolerance of this rank; None without sparse checkpointing."""
    rejoined: Rejoined | None = None
    """Agreement of all ranks on how to restore the state; None except between a failure and the resumed training."""
    has_begun: bool = False
    """True if training has begun, so that this rank has state to keep through a failure."""
    resumed_in: int = -1
    """Newest generation in which training continued, with all earlier failures recovered."""

    resized: Resized | None = None
    """State that a resize of an elastic job brought to this rank; None once training is entered."""
    stand: RankPosition | None = None
    """Position of this rank when its model was built."""
    formation: Formation | None = None
    """Positions of all ranks of the job."""
    loads: RoutedLoads | None = None
    """Loads of experts in slots; None without slots."""

    place_of_failure: int = 0
    """Position in the flow of an iteration at which values were first not finite; see ``runtime/results.py``."""
    config_before: dict[str, Any] = field(default_factory=dict)
    """Values of the configuration fields that training overwrites, from before training."""

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.live)
        self.binding = MegatronBinding(self.live, self.ledger)

    def free(self) -> None:
        """Free the model, the optimizer and the host memory of a finished job, without waiting for other ranks."""
        if self.session is not None:
            self.session.end_threads()
        leftovers.drop_references(self.live)
        self.live.model = self.live.optimizer = self.live.scheduler = self.live.loop = None
        self.session = self.rejoined = self.loads = None

    def event(self, event: Event) -> None:
        """Append an event to the run's record, on the rank that keeps the record."""
        if self.live.record is not None:
            self.live.record.event(event)


class Process:
    """State of this process that outlives its job."""

    def __init__(self) -> None:
        self.job = Job()
        self.lineage = ""
        """Name of the job's start (:attr:`JobNames.start`) whose training led to this process's state."""
        self.survivor: SurvivorState | None = None
        """State that this rank brings to the reassembly of an elastic job; None outside of a reassembly."""
        self.before: Sequence[FormationSnapshots] = ()
        """Snapshots from before the job's last resize, kept until a window of the present size is persisted."""
        self.rejected_at = 0
        """Last iteration whose result this process rejected, because it was not finite, before computing it again."""
        self.transient_failures = 0
        """Number of results that this process rejected, and that were finite when it computed them again."""

    def start_over(self) -> Job:
        """Free the memory of the job, and return a new empty job."""
        self.job.free()
        self.job = Job()
        return self.job
