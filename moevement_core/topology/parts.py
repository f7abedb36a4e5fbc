"""Objects of one rank that a recovery uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moevement_core.engine.checkpointer import Checkpointer
from moevement_core.engine.layout import OperatorState
from moevement_core.topology.topology import Topology
from moevement_core.trainer.interface import BindingInterface


@dataclass(frozen=True)
class RankParts:
    """Objects of one rank in one generation that the functions of a recovery receive as one argument."""

    binding: BindingInterface
    topology: Topology
    states: Mapping[str, OperatorState]
    """Live tensors by operator."""
    checkpointer: Checkpointer
