"""What a campaign draws from: layouts, ways to recover, recipes, protections, nodes."""

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
"""Each rank is a node."""
_OF_NODES: Mapping[str, tuple[str, ...]] = {COPIES: ("--moevement-protection", "copies:1")}
"""Two nodes of two have no room for a group of parity, nor for two copies, without which own ones are not dropped."""
PROTECTIONS = [(name, 1) for name in _OF_RANKS] + [(name, PER_NODE) for name in _OF_NODES]
WITH_WINDOWS = (COPIES, PARITY)
"""Windows on disk are written from own snapshots."""


@dataclass(frozen=True)
class Cell:
    """One job's kind."""

    layout: str
    recovery: str
    recipe: str
    protection: str
    per_node: int
    """Processes that are a node, and may be lost at once; 1: single ranks are."""

    @property
    def trainer(self) -> list[str]:
        """The flags that decide on its numbers: runs with the same have the same final state."""
        return [*QUICK, *LAYOUTS[self.layout], *RECIPES[self.recipe]]

    @property
    def guard(self) -> list[str]:
        """Flags of what protects it."""
        kinds = _OF_RANKS if self.per_node == 1 else _OF_NODES
        return ["--moevement-recovery", self.recovery, *kinds[self.protection]]

    @property
    def options(self) -> list[str]:
        """Of the launcher."""
        nodes = ["--ranks-per-node", str(self.per_node)] if self.per_node > 1 else []
        return ["--spares", str(SPARES if self.per_node > 1 else 2), *nodes]

    def __str__(self) -> str:
        nodes = f", nodes of {self.per_node}" if self.per_node > 1 else ""
        return f"{self.layout}, {self.recovery}, {self.recipe}, {self.protection}{nodes}"

    def as_dict(self) -> dict[str, str | int]:
        """As it is recorded."""
        return asdict(self)


def draw_cell(draw: random.Random) -> Cell:
    """Any cell, half of them in BF16."""
    layout, recovery = draw.choice(list(LAYOUTS)), draw.choice(RECOVERIES)
    recipe = "BF16" if draw.random() < 0.5 else draw.choice([one for one in RECIPES if one != "BF16"])
    protection, per_node = draw.choice(PROTECTIONS)
    return Cell(layout, recovery, recipe, protection, per_node)
