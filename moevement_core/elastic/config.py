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
        raise ConfigError(f"{name} {value:g}; needs seconds, 0 or more")
    return value


@dataclass(frozen=True)
class ElasticConfig:
    """Configuration of a job that may change its number of ranks."""

    is_elastic: bool = flag(
        SWITCH, action="store_true", default=False,
        help="go on with fewer data-parallel replicas where ranks are lost and no spare is left, and with more again "
        "when processes have joined; the global batch stays the same",
    )  # fmt: skip
    join_wait_s: float = flag(
        "--moevement-join-wait", type=float, default=JOIN_WAIT_S, metavar="S", check=_seconds,
        help="an elastic job grows when no further process has joined for so many seconds, so that several are taken "
        f"in together (default: {JOIN_WAIT_S:g})",
    )  # fmt: skip
    expert_slots: int | None = flag(
        "--moevement-expert-slots", type=int, metavar="C", check=at_least(1),
        help="experts that a rank of an elastic job holds of each layer: popular ones have more replicas, and each "
        "layer spreads over all data-parallel ranks, whatever their number (default: experts as "
        "--expert-model-parallel-size spreads them)",
    )  # fmt: skip
    min_replicas: int = flag(
        "--moevement-min-replicas", type=int, default=MIN_REPLICAS, metavar="F", check=at_least(1),
        help="replicas that each expert has at least where there are slots for them, with --moevement-expert-slots: "
        f"F - 1 ranks may be lost at once (default: {MIN_REPLICAS})",
    )  # fmt: skip
    rebalance_interval: int = flag(
        "--moevement-rebalance-interval", type=int, default=REBALANCE_INTERVAL, metavar="N", check=at_least(1),
        help="iterations from one look at the loads of experts to the next, with --moevement-expert-slots: they are "
        "placed anew if the slowest replica would have a tenth less to do (default: "
        f"{REBALANCE_INTERVAL})",
    )  # fmt: skip
    placement: str | None = flag(
        "--moevement-expert-placement", metavar="FILE",
        help="the experts in the slots of each rank at the start, by layer, as an elastic job writes them to "
        "placements/ of its run directory (default: placed as if all had equal loads)",
    )  # fmt: skip
