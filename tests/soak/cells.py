"""Cells of a campaign: combinations of layout, recovery, recipe, protection and node size, drawn at random."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from tests.soak.__main__ import QUICK

LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "PP2 x EP2": (),
    "PP4": ("--pipeline-model-parallel-size", "4", "--expert-model-parallel-size", "1"),
    "PP2 x DP2": ("--expert-model-parallel-size", "1"),
    "VPP2 x EP2": ("--num-layers-per-virtual-pipeline-stage", "1"),
    "EP2 x DP2": ("--pipeline-model-parallel-size", "1"),
    "TP2 x PP2": (
        "--tensor-model-parallel-size", "2", "--sequence-parallel", "--expert-model-parallel-size", "1",
        "--expert-tensor-parallel-size", "1",
    ),
}  # fmt: skip
RECOVERIES = ("replay", "redo")
PER_NODE, SPARES = 2, 4
RECIPES: Mapping[str, tuple[str, ...]] = {
    "BF16": (),
    "FP8 delayed": ("--fp8-format", "hybrid", "--fp8-recipe", "delayed"),
    "FP8 tensorwise": ("--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"),
    "FP8 blockwise": ("--fp8-format", "hybrid", "--fp8-recipe", "blockwise"),
}
COPIES, PARITY, DROPPED = "copies", "parity", "own dropped"
_OF_RANKS: Mapping[str, tuple[str, ...]] = {
    COPIES: (), PARITY: ("--moevement-protection", "parity:3+1"), DROPPED: ("--moevement-keep-own", "never"),
}  # fmt: skip
"""Flags of each protection if each rank is a node."""
_OF_NODES: Mapping[str, tuple[str, ...]] = {COPIES: ("--moevement-protection", "copies:1")}
"""Flags of each protection for jobs on two nodes of two ranks.

Two nodes allow one copy, and neither two copies nor a parity group. With one copy, ranks keep their own snapshots."""
PROTECTIONS = [(name, 1) for name in _OF_RANKS] + [(name, PER_NODE) for name in _OF_NODES]
WITH_WINDOWS = (COPIES, PARITY)
"""Protections that keep own snapshots, from which windows on disk are written."""


@dataclass(frozen=True)
class Cell:
    """Combination of settings that a job of the campaign runs with."""

    layout: str
    recovery: str
    recipe: str
    protection: str
    per_node: int
    """Processes of a node, which may be lost at once; 1 if each rank is a node."""

    @property
    def trainer(self) -> list[str]:
        """Flags that determine the numbers of a run; runs with equal flags have equal final states."""
        return [*QUICK, *LAYOUTS[self.layout], *RECIPES[self.recipe]]

    @property
    def guard(self) -> list[str]:
        """Flags of recovery and protection."""
        kinds = _OF_RANKS if self.per_node == 1 else _OF_NODES
        return ["--moevement-recovery", self.recovery, *kinds[self.protection]]

    @property
    def options(self) -> list[str]:
        """Options of the launcher: spares, and the size of a node."""
        nodes = ["--ranks-per-node", str(self.per_node)] if self.per_node > 1 else []
        return ["--spares", str(SPARES if self.per_node > 1 else 2), *nodes]

    def __str__(self) -> str:
        nodes = f", nodes of {self.per_node}" if self.per_node > 1 else ""
        return f"{self.layout}, {self.recovery}, {self.recipe}, {self.protection}{nodes}"

    def as_dict(self) -> dict[str, str | int]:
        """Return the settings as fields for the record of a job."""
        return asdict(self)


def draw_cell(draw: random.Random) -> Cell:
    """Draw a cell; half of all cells train in BF16."""
    layout, recovery = draw.choice(list(LAYOUTS)), draw.choice(RECOVERIES)
    recipe = "BF16" if draw.random() < 0.5 else draw.choice([name for name in RECIPES if name != "BF16"])
    protection, per_node = draw.choice(PROTECTIONS)
    return Cell(layout, recovery, recipe, protection, per_node)
