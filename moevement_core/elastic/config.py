"""The flags of elastic jobs."""

from __future__ import annotations

from dataclasses import dataclass

from moevement_core.errors import ConfigError
from moevement_core.flags import flag

JOIN_WAIT_S = 30.0
SWITCH = "--moevement-elastic"


def _seconds(name: str, value: float) -> float:
    if not 0.0 <= value < float("inf"):
        raise ConfigError(f"{name} {value:g}; needs seconds, 0 or more")
    return value


@dataclass(frozen=True)
class ElasticConfig:
    """How a job changes its size."""

    is_elastic: bool = flag(
        SWITCH, action="store_true", default=False,
        help="go on with fewer data-parallel replicas where ranks are lost and no spare is left, and with more again when "
        "processes have joined; the global batch stays the same",
    )  # fmt: skip
    join_wait_s: float = flag(
        "--moevement-join-wait", type=float, default=JOIN_WAIT_S, metavar="S", check=_seconds,
        help="seconds that an elastic job waits for further processes after one has joined that makes it larger, so that "
        f"several are taken in together (default: {JOIN_WAIT_S:g})",
    )  # fmt: skip
