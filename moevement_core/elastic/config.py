"""Command-line flags of elastic jobs, which may change their number of ranks."""

from __future__ import annotations

from dataclasses import dataclass

from moevement_core.errors import ConfigError
from moevement_core.util.flags import at_least, flag

JOIN_WAIT_S = 30.0
MIN_REPLICAS = 2
REBALANCE_INTERVAL = 200
SWITCH = "--moevement-elastic"


def _seconds(name: str, value: float) -> float:
    if not 0.0 <= value < float("inf"):
        raise ConfigError(f"{name} {value:g}; needs a number of seconds, 0 or more")
    return value


@dataclass(frozen=True)
class ElasticConfig:
    """Flags with which a job may change its number of ranks."""

    is_elastic: bool = flag(
        SWITCH, action="store_true", default=False,
        help="continue with fewer data-parallel replicas when ranks fail and no spare is left, and grow to more "
        "replicas when processes join; the global batch stays the same",
    )  # fmt: skip
    join_wait_s: float = flag(
        "--moevement-join-wait", type=float, default=JOIN_WAIT_S, metavar="S", check=_seconds,
        help="before it grows, an elastic job waits until no further process has joined for S seconds, to admit "
        f"several processes together (default: {JOIN_WAIT_S:g})",
    )  # fmt: skip


@dataclass(frozen=True)
class SlotsConfig:
    """Flags of an elastic job that places experts in slots."""

    expert_slots: int | None = flag(
        "--moevement-expert-slots", type=int, metavar="C", check=at_least(1),
        help="number of expert slots that each rank of an elastic job has in each layer; popular experts get more "
        "replicas, and the experts of a layer spread over all data-parallel ranks (default: no slots; "
        "--expert-model-parallel-size spreads the experts)",
    )  # fmt: skip
    min_replicas: int = flag(
        "--moevement-min-replicas", type=int, default=MIN_REPLICAS, metavar="F", check=at_least(1),
        help="with --moevement-expert-slots: least number of replicas of each expert; they are on F nodes if slots and "
        "nodes suffice, so that any F - 1 nodes may fail at once, else on F ranks if slots suffice (default: "
        f"{MIN_REPLICAS})",
    )  # fmt: skip
    rebalance_interval: int = flag(
        "--moevement-rebalance-interval", type=int, default=REBALANCE_INTERVAL, metavar="N", check=at_least(1),
        help="with --moevement-expert-slots: iterations between two checks of the experts' loads; the job places the "
        "experts anew if the slowest replica would then get at least a tenth fewer tokens (default: "
        f"{REBALANCE_INTERVAL})",
    )  # fmt: skip
    placement: str | None = flag(
        "--moevement-expert-placement", metavar="FILE",
        help="file with the experts in each rank's slots at the start, by layer; elastic jobs write such files to "
        "placements/ of their run directories (default: a placement for equal loads)",
    )  # fmt: skip
