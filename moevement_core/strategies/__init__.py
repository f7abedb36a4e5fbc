"""Checkpointing strategies: pure code that plans what each snapshot holds and which snapshots restore a state.

A new strategy is one file, one line in ``registry.py``, and one test. The file has a
:class:`~moevement_core.policy.schedule.Schedule`, which plans what each snapshot holds, and a :class:`Strategy`, which
makes schedules, says which flags it has, and makes itself from them.
"""

from moevement_core.strategies.checkfreq import CheckFreq
from moevement_core.strategies.dense import DenseSchedule, DenseToPeers
from moevement_core.strategies.gemini import Gemini
from moevement_core.strategies.moc import MoC, PartialSchedule
from moevement_core.strategies.moc_by_load import MoCByLoad
from moevement_core.strategies.moetion import MoEtion
from moevement_core.strategies.moevement import MoEvement
from moevement_core.strategies.redo import Redo, RedoSchedule
from moevement_core.strategies.selected import SelectedSchedule
from moevement_core.strategies.sparse import SparseSchedule
from moevement_core.strategies.strategy import Measured, Proposal, Strategy

__all__ = [
    "CheckFreq", "DenseSchedule", "DenseToPeers", "Gemini", "Measured", "MoC", "MoCByLoad", "MoEtion", "MoEvement",
    "PartialSchedule", "Proposal", "Redo", "RedoSchedule", "SelectedSchedule", "SparseSchedule", "Strategy",
]  # fmt: skip
