"""State of a rank that the replaced functions of Megatron share.

:class:`Job` has the model and all objects that belong to it. A process makes a new :class:`Job` if it has no state to
keep, and when an elastic job changes its ranks. :class:`Process` has the state that outlives a :class:`Job`. There is
one :class:`Process` in each process. :mod:`megatron.moevement.activate` builds it and passes it to all replaced
functions, because Megatron passes no such object to them.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, field
from typing import Any

from megatron.moevement.binding import MegatronBinding
from megatron.moevement.elastic.loads import RoutedLoads
from megatron.moevement.restart import leftovers
from megatron.moevement.runtime.host import HostTrainer, MegatronLM
from megatron.moevement.runtime.ledger import Ledger
from megatron.moevement.runtime.live import Live
from moevement_core.run.events import Event
from moevement_core.saving.identity import JobNames
from moevement_core.session.kept_state import Resizing
from moevement_core.session.rejoin import Rejoined
from moevement_core.session.resize import ResizedSession
from moevement_core.session.session import Session


@dataclass
class Job:
    """Model, metrics, binding and session of a rank; :meth:`Process.start_over` replaces them by new, empty objects."""

    live: Live = field(default_factory=Live)
    ledger: Ledger = field(init=False)
    binding: MegatronBinding = field(init=False)
    names: JobNames = field(default_factory=JobNames)
    session: Session | None = None
    """Fault tolerance of this rank; None without sparse checkpointing."""
    rejoined: Rejoined | ResizedSession | None = None
    """Agreement of all ranks on how to restore the state after a failure; None once training continues."""
    has_begun: bool = False
    """True if training has begun, so that this rank has state to keep through a failure."""
    resumed_in: int = -1
    """Newest generation in which this rank began or continued training; -1 before the first."""

    loads: RoutedLoads | None = None
    """Counter of the tokens that experts received; None without expert slots."""

    place_of_failure: int = 0
    """Position in the order of an iteration's computation at which this rank's values were first not finite.

    ``runtime/results.py`` numbers these positions.
    """
    config_before: dict[str, Any] = field(default_factory=dict)
    """Values that fields of the model's configuration had before training overwrote them, by name of the field."""

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
        """Append an event to the run's record; a rank without the record does nothing."""
        if self.live.record is not None:
            self.live.record.event(event)


class Process:
    """State of a process that is kept when the process begins a new :class:`Job`."""

    def __init__(self) -> None:
        self.job = Job()
        self._args = Namespace()
        self._host: HostTrainer = MegatronLM()
        self.resizing = Resizing()
        """State that the process keeps while an elastic job changes its ranks."""
        self.rejected_at = 0
        """Newest iteration in which this process rejected a result, with ``--rerun-mode disabled``."""
        self.transient_failures = 0
        """Number of non-finite results that began on this rank, and for which a second pass gave another result."""

    @property
    def args(self) -> Namespace:
        """Arguments of the trainer; without attributes before a trainer has been entered."""
        return self._args

    def take_trainer(self, args: Namespace, host: HostTrainer) -> None:
        """Use ``host`` as the trainer and ``args`` as its arguments, in this job and in every later one.

        A trainer calls this when it is entered for the first time.
        """
        self._args = self.job.live.args = args
        self._host = self.job.live.host = host

    def start_over(self) -> Job:
        """Free the memory of this process's :class:`Job`, and make a new empty one in its place."""
        self.job.free()
        self.job = Job(Live(self._args, self._host))
        return self.job
