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
    """What Megatron's ``train`` was called with, and its steps are."""

    forward_step_func: Any
    config: Any
    p2p_communicator: Any
    pg_collection: Any


@dataclass
class Live:
    """Of this rank."""

    model: list[Any] | None = None
    """The chunks of this rank in their data-parallel wrappers."""
    optimizer: Any = None
    scheduler: Any = None
    datasets: list[Any] = field(default_factory=list)
    """Training, validation and test set of each virtual pipeline chunk, None on ranks that read no data."""
    datasets_asked: int = 0
    """For how many chunks, since training was entered last."""
    loop: TrainLoop | None = None
    """None before Megatron's training loop begins."""
    iteration: int = 0
    """The last committed iteration; 0 before the first."""
    num_tokens: Any = None
    """Of the batch of the iteration that is under way, a tensor on the device; None without per-token loss."""
    is_saving: bool = False
    """Whether a dense save is under way on the main thread; stays so when it is interrupted."""
    samples_are_known: bool = False
    """Whether the numbers of consumed samples were put back, and a zero among them is one."""
    boundary_log: BoundaryLog | None = None
    """What this rank sends over stage boundaries, where sparse checkpointing is on and there are several stages."""
    feeds: Feeds | None = None
    """Where a replay gets what healthy neighbours sent; None in training."""
    record: RunRecord | None = None
    """Where this rank records events; None on ranks that record nothing and without ``--run-dir``."""
    undo: UndoStack = field(default_factory=UndoStack)
    """What was changed for a while, by a replay for example."""
