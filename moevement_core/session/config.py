"""How a session is configured: the flags of its parts, each declared where it is used."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from moevement_core.engine.config import BudgetConfig, Verify, VerifyConfig
from moevement_core.flags import add_flags, from_args
from moevement_core.persistence.config import DiskConfig
from moevement_core.rendezvous.config import TimeoutsConfig
from moevement_core.replication.config import CopiesConfig
from moevement_core.restart.drills import DrillConfig
from moevement_core.strategies.config import StrategyConfig

SWITCH = "--moevement-sparse-ckpt"


@dataclass(frozen=True)
class SessionConfig:
    """All of it."""

    strategy: StrategyConfig
    copies: CopiesConfig
    budget: BudgetConfig
    timeouts: TimeoutsConfig
    verify: Verify
    disk: DiskConfig
    drill: DrillConfig

    @staticmethod
    def from_args(args: argparse.Namespace, *, has_experts: bool) -> SessionConfig:
        """Returns what the flags of :func:`add_session_flags` say.

        Raises:
            ConfigError: a value cannot be.
        """
        return SessionConfig(
            from_args(StrategyConfig, args, has_experts=has_experts),
            from_args(CopiesConfig, args),
            from_args(BudgetConfig, args),
            from_args(TimeoutsConfig, args),
            from_args(VerifyConfig, args).verify,
            from_args(DiskConfig, args),
            from_args(DrillConfig, args),
        )


def add_session_flags(group: Any, *, has_switch: bool = False) -> None:
    """Add the flags of every part to a parser, or a group of one.

    Args:
        group: of ``argparse``.
        has_switch: whether there is to be ``--moevement-sparse-ckpt``, without which nothing is saved.
    """
    if has_switch:
        group.add_argument(
            SWITCH,
            action="store_true",
            help="keep a slice of the training state in host memory, and on peers, every iteration",
        )
    add_flags(group, StrategyConfig, CopiesConfig, BudgetConfig, TimeoutsConfig, VerifyConfig, DiskConfig, DrillConfig)
