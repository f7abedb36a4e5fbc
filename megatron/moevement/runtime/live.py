"""Live objects of Megatron's trainer in this process.

Megatron builds model, optimizer, scheduler and data sets inside ``pretrain()`` and passes them to no callback. The
replaced functions of :mod:`megatron.moevement.activate` keep them here.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.moevement.runtime.host import HostTrainer, MegatronLM, TrainLoop
from moevement_core.recovery.boundary_log import BoundaryLog
from moevement_core.recovery.feed import Feeds
from moevement_core.run.run_record import RunRecord
from moevement_core.util.undo import UndoStack


@dataclass
class Live:
    """Live objects of this rank."""

    args: Namespace = field(default_factory=Namespace)
    """Arguments of the trainer, under the names of Megatron's flags; the trainer hands them over when it is entered."""
    host: HostTrainer = field(default_factory=MegatronLM)
    """Trainer that runs the training loop."""
    model: list[Any] | None = None
    """Virtual stages of this rank in their data-parallel wrappers."""
    optimizer: Any = None
    scheduler: Any = None
    datasets: list[Any] = field(default_factory=list)
    """Training, validation and test set of each virtual stage; None on ranks that read no data."""
    datasets_asked: int = 0
    """Number of virtual stages for which Megatron has asked for data sets since the start or the last failure."""
    loop: TrainLoop | None = None
    """Arguments of the training loop; None before it begins."""
    iteration: int = 0
    """Last committed iteration; 0 before the first."""
    num_tokens: Any = None
    """Number of tokens in the current iteration's batch, as a tensor on the device; None without per-token loss."""
    is_saving: bool = False
    """True while a dense save runs on the main thread; an interruption leaves it True."""
    samples_are_known: bool = False
    """True if a recovery restored the numbers of consumed samples, so that zero means that none were consumed."""
    boundary_log: BoundaryLog | None = None
    """Log of what this rank sends over stage boundaries; None without sparse checkpointing or with one stage."""
    feeds: Feeds | None = None
    """Tensors from boundary logs, which this rank receives in a replay instead of tensors from its neighbours.

    None in training, and in a replay of all stages.
    """
    run_dir: Path | None = None
    """Folder for the run's metrics, events and summary, on all ranks; None without ``--run-dir``."""
    record: RunRecord | None = None
    """Record to which this rank writes events; None on ranks that write none, and without ``--run-dir``."""
    undo: UndoStack = field(default_factory=UndoStack)
    """Stack that reverses temporary changes, for example those of a replay."""
