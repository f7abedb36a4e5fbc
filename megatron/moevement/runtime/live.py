"""The live objects of Megatron's trainer in this process.

Megatron builds model, optimizer, scheduler and data sets inside ``pretrain()`` and hands them to nobody; the replaced
functions of :mod:`megatron.moevement.activate` put them here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from moevement_core.boundary_log import BoundaryLog
from moevement_core.recovery.feed import Feeds
from moevement_core.run_record import RunRecord
from moevement_core.undo import UndoStack


@dataclass(frozen=True, slots=True)
class TrainLoop:
    """Arguments of Megatron's ``train``, and its steps."""

    forward_step_func: Any
    config: Any
    p2p_communicator: Any
    pg_collection: Any


@dataclass
class Live:
    """Live objects of this rank."""

    model: list[Any] | None = None
    """The chunks of this rank in their data-parallel wrappers."""
    optimizer: Any = None
    scheduler: Any = None
    datasets: list[Any] = field(default_factory=list)
    """Training, validation and test set of each virtual pipeline chunk, None on ranks that read no data."""
    datasets_asked: int = 0
    """Number of chunks that asked for data sets since training was entered last."""
    loop: TrainLoop | None = None
    """Training loop; None before Megatron's begins."""
    iteration: int = 0
    """The last committed iteration; 0 before the first."""
    num_tokens: Any = None
    """Tokens of the current iteration's batch, a tensor on the device; None without per-token loss."""
    is_saving: bool = False
    """True while a dense save runs on the main thread; stays so when it is interrupted."""
    samples_are_known: bool = False
    """True if the numbers of consumed samples were restored, so that a zero among them is real."""
    boundary_log: BoundaryLog | None = None
    """Log of what this rank sends over stage boundaries, where sparse checkpointing is on and there
    are several stages.
    """
    feeds: Feeds | None = None
    """Feeds of a replay with what healthy neighbours sent; None in training."""
    record: RunRecord | None = None
    """Record that this rank writes events to; None on ranks that write none and without ``--run-dir``."""
    undo: UndoStack = field(default_factory=UndoStack)
    """Temporary changes, by a replay for example."""
