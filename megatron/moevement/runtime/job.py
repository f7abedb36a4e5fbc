"""The job that this process takes part in, as the replaced functions of Megatron share it.

There is one :class:`Process`, made when the replacements are (:mod:`megatron.moevement.activate`) and handed to each of
them; Megatron itself passes them nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.moevement.binding import MegatronBinding
from megatron.moevement.elastic.held import Formation, Held
from megatron.moevement.elastic.loads import RoutedLoads
from megatron.moevement.elastic.offer import Offer
from megatron.moevement.elastic.pieces import Stand
from megatron.moevement.elastic.resized import Resized
from megatron.moevement.restart import leftovers
from megatron.moevement.runtime.ledger import Ledger
from megatron.moevement.runtime.live import Live
from moevement_core.events import Event
from moevement_core.session.identity import JobNames
from moevement_core.session.rejoin import Rejoined
from moevement_core.session.session import Session


@dataclass
class Job:
    """Job in this process, from one start to the next."""

    live: Live = field(default_factory=Live)
    ledger: Ledger = field(init=False)
    binding: MegatronBinding = field(init=False)
    names: JobNames = field(default_factory=JobNames)
    session: Session | None = None
    """This rank's fault tolerance, where sparse checkpointing is on."""
    rejoined: Rejoined | None = None
    """Agreement on how the current state is restored, once training is entered again."""
    has_begun: bool = False
    """True if training has begun, so that there is state to keep through a failure."""
    resumed_in: int = -1
    """The newest generation in which training went on, with every failure before behind it."""

    resized: Resized | None = None
    """State that was brought to this rank of an elastic job, to be used once training is entered."""
    stand: Stand | None = None
    """Position of this rank when its model was built."""
    formation: Formation | None = None
    """Positions of all its ranks."""
    loads: RoutedLoads | None = None
    """Loads of experts in slots."""

    place_of_failure: int = 0
    """Place in the flow of an iteration where values were first not finite; see
    :mod:`megatron.moevement.runtime.results`.
    """
    config_before: dict[str, Any] = field(default_factory=dict)
    """Content of the model's configuration before training put its own into it."""

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.live)
        self.binding = MegatronBinding(self.live, self.ledger)

    def let_go(self) -> None:
        """Free model, optimizer and host memory of a job that is over in this process; waits for nobody else."""
        if self.session is not None:
            self.session.let_go()
        leftovers.let_go(self.live)
        self.live.model = self.live.optimizer = self.live.scheduler = self.live.loop = None
        self.session = self.rejoined = self.loads = None

    def event(self, event: Event) -> None:
        """Append an event to the run's record, on the rank that keeps it."""
        if self.live.record is not None:
            self.live.record.event(event)


class Process:
    """Whichever job this process is in."""

    def __init__(self) -> None:
        self.job = Job()
        self.lineage = ""
        """The start of the job that its state has come from, in an unbroken row of iterations."""
        self.offer: Offer | None = None
        """Offer of an elastic job that is being put together again."""
        self.before: Sequence[Held] = ()
        """Snapshots of before the job got its present size, until a window of that is persisted."""
        self.rejected_at = 0
        """The last iteration in which this process rejected a result of its own, without a second pass."""
        self.transient_failures = 0
        """Times that this process computed a result that was not repeated."""

    def start_over(self) -> Job:
        """Forget the job, free what it holds, and begin an empty one; returns it."""
        self.job.let_go()
        self.job = Job()
        return self.job
