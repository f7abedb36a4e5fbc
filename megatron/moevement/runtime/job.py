"""What one process knows of its training job: the live objects, and where the run is recorded.

There is one job in a process. Megatron builds model, optimizer, scheduler and data sets inside ``pretrain()`` and
hands them to nobody; the replaced functions of :mod:`megatron.moevement.activate` put them here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron.moevement.runtime.rooms import Rooms
from moevement_core.boundary_log import BoundaryLog
from moevement_core.run_record import RunRecord

if TYPE_CHECKING:
    from megatron.moevement.pipeline_parallel.communicator import Feeds
    from megatron.moevement.restart.comeback import Comeback
    from megatron.moevement.restart.megatron_state import Groups
    from megatron.moevement.runtime.replay import TrainLoop
    from megatron.moevement.runtime.sparse import SparseRun


@dataclass
class Job:
    """The live objects of this rank."""

    model: list[Any] | None = None
    optimizer: Any = None
    scheduler: Any = None
    samples_are_known: bool = False
    """Whether the numbers of consumed samples were put back, and a zero among them is one."""
    iteration: int = 0
    """The last committed iteration; 0 before the first."""
    last_step_s: float | None = None
    """Seconds that the last training step of this rank took."""
    last_loss: float | str | None = None
    micro_batch_losses: tuple[int, Any] = (0, None)
    """The iteration that ran forward and backward last, and what Megatron's schedule gave for it."""
    replayed_lines: dict[int, dict[str, Any]] = field(default_factory=dict)
    """What metrics say of replayed iterations, by their number: for lines whose writer died or was interrupted."""
    held_out: dict[str, Any] = field(default_factory=dict)
    """The last loss on the validation and on the test set."""
    evaluated_set: str = "validation"
    loop: TrainLoop | None = None
    """What Megatron's training loop was called with; None before it begins."""
    boundary_log: BoundaryLog | None = None
    """What this rank sends over stage boundaries, where sparse checkpointing is on and there are several stages."""
    feeds: Feeds | None = None
    """Where a replay gets what healthy neighbours sent; None in training."""
    sparse: SparseRun | None = None
    """Sparse checkpointing of this rank, where it is on."""
    begun: bool = False
    """Whether training has begun, so that there is something to keep through a failure."""
    resumed_in: int = -1
    """The newest generation in which training went on, with every failure before behind it."""
    groups: list[Groups] = field(default_factory=list)
    """The process groups that the live objects refer to; of several generations only while they are replaced."""
    config: dict[str, Any] = field(default_factory=dict)
    """What the model's configuration held before training put its own into it."""
    parameter_keys: list[Any] = field(default_factory=list)
    """What ranks told each other of their parameters when the optimizer was built."""
    datasets: list[Any] = field(default_factory=list)
    """Training, validation and test set of each virtual pipeline chunk, None on ranks that read no data."""
    comeback: Comeback | None = None
    """How the state of now is to be brought back, once training is entered again."""
    rooms: Rooms = field(default_factory=Rooms)
    """What a replay has put aside."""
    name: str = ""
    """Of the job, the same in all its processes: who owns the folders that it writes to."""
    start: str = ""
    """Of this start within the job: in the names of the windows that it writes to disk."""
    record: RunRecord | None = None
    """Where this rank records events; None on ranks that record nothing and without ``--run-dir``."""

    def event(self, kind: str, **fields: Any) -> None:
        """Append an event to the run's record, on the rank that keeps it."""
        if self.record is not None:
            self.record.event(kind, **fields)


_job = Job()


def current_job() -> Job:
    """The job of this process."""
    return _job


def start_job() -> Job:
    """Forget the job of an earlier ``pretrain()`` in this process and begin an empty one."""
    global _job
    _job = Job()
    return _job
