"""Flags for timeouts: how long a node or rank may be silent before it counts as failed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from moevement_core.errors import ConfigError
from moevement_core.rendezvous.coordinator import LEASE_S
from moevement_core.util.flags import flag, positive

SHORTEST_LEASE_S = 1.0
"""Shortest lease time that the flag accepts, in seconds."""
LEASES_TO_HANG = 6
"""Number of lease times after which a rank counts as hung if its main thread makes no progress."""


def lease_seconds(text: str) -> float:
    """Return the value of ``--moevement-lease-seconds`` as a number.

    Raises:
        ConfigError: the value is not a number, or shorter than :data:`SHORTEST_LEASE_S`.
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
    """Timeouts of a rank: how long nodes, ranks and peers may be silent.

    A node or rank that is silent for longer counts as failed. A peer that does not answer for longer is only reported.
    """

    peer_timeout: float | None = flag(
        "--moevement-peer-timeout", type=float, metavar="S", check=positive(None),
        help="seconds after which a rank reports a peer that does not answer; training never waits for peers (default: "
        "six lease times)",
    )  # fmt: skip
    lease_s: float = flag(
        "--moevement-lease-seconds", type=lease_seconds, default=LEASE_S, metavar="S",
        help="lease time: seconds of silence after which a node or a rank counts as failed; every other timeout of a "
        f"recovery derives from the lease time (default: {LEASE_S:g})",
    )  # fmt: skip

    @property
    def peer_s(self) -> float:
        """Seconds without an answer after which a rank reports a peer that keeps copies of its snapshots."""
        return LEASES_TO_HANG * self.lease_s if self.peer_timeout is None else self.peer_timeout
