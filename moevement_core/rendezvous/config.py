"""The flags of leases: when silence is a loss."""

from __future__ import annotations

import math
from dataclasses import dataclass

from moevement_core.errors import ConfigError
from moevement_core.flags import flag, positive
from moevement_core.rendezvous.coordinator import LEASE_S

SHORTEST_LEASE_S = 1.0
LEASES_TO_HANG = 6
"""For how many lease times the main thread of a rank may run nothing before it is taken to hang."""


def lease_seconds(text: str) -> float:
    """The value of ``--moevement-lease-seconds``.

    Raises:
        ConfigError: it is no lease.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= SHORTEST_LEASE_S):
        raise ConfigError(f"--moevement-lease-seconds {text}; needs {SHORTEST_LEASE_S:g} seconds or more")
    return value


@dataclass(frozen=True)
class TimeoutsConfig:
    """When silence is a loss."""

    peer_timeout: float | None = flag(
        "--moevement-peer-timeout", type=float, metavar="S", check=positive(None),
        help="seconds after which a peer that does not answer is reported; training never waits for it (default: six "
        "lease times)",
    )  # fmt: skip
    lease_s: float = flag(
        "--moevement-lease-seconds", type=lease_seconds, default=LEASE_S, metavar="S",
        help="seconds without a word of it after which a node, or a rank, is lost; every other timeout of a recovery "
        f"derives from it (default: {LEASE_S:g})",
    )  # fmt: skip

    @property
    def peer_s(self) -> float:
        """After so many seconds a peer that does not answer is reported."""
        return LEASES_TO_HANG * self.lease_s if self.peer_timeout is None else self.peer_timeout
