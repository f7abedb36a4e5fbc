"""Strategies by the name that the user gives. A new strategy has one file, and one line here.

The lines name classes in text, so that the flags of strategies (``config.py``) can list all names, and the file of a
strategy can read its flags.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moevement_core.strategies.strategy import Strategy

STRATEGIES = {
    "moevement": "moevement_core.strategies.moevement:MoEvement",
    "moevement+redo": "moevement_core.strategies.redo:Redo",
    "moevement+auto": "moevement_core.strategies.redo:Redo",
    "dense": "moevement_core.strategies.dense:DenseToPeers",
    "checkfreq": "moevement_core.strategies.checkfreq:CheckFreq",
    "gemini": "moevement_core.strategies.gemini:Gemini",
    "moc": "moevement_core.strategies.moc:MoC",
    "moc+load": "moevement_core.strategies.moc_by_load:MoCByLoad",
    "moetion": "moevement_core.strategies.moetion:MoEtion",
}
"""Module and class of each strategy. The key is its name, or its name, a plus sign, and the value of a further flag."""


def names() -> list[str]:
    """Return the names of strategies that ``--moevement-strategy`` accepts."""
    return [name for name in STRATEGIES if "+" not in name]


def strategy_class(name: str, variant: str | None = None) -> type[Strategy]:
    """Return the class of a strategy.

    Args:
        name: name of the strategy.
        variant: value of a further flag that may choose another class (``--moevement-recovery``,
            ``--moevement-selection``); None without such a flag.
    """
    module, _, kind = STRATEGIES.get(f"{name}+{variant}", STRATEGIES[name]).partition(":")
    strategy: type[Strategy] = getattr(import_module(module), kind)
    return strategy
