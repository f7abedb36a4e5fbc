"""Flags for timeouts and the health of nodes: how long a node may be silent, and what each node checks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from moevement_core.errors import ConfigError
from moevement_core.rendezvous.coordinator import LEASE_S
from moevement_core.util.flags import flag, positive

HEALTH_CHECK, HEALTH_SECONDS = "--moevement-health-check", "--moevement-health-seconds"
HEALTH_S = 30.0
"""Default of :data:`HEALTH_SECONDS`."""
SHORTEST_LEASE_S = 1.0
"""Shortest lease time that the flag accepts, in seconds."""
LEASES_TO_HANG = 6
"""Number of lease times after which a rank counts as hung if its main thread makes no progress."""


def lease_seconds(text: str) -> float:
    """Return the value of ``--moevement-lease-seconds`` as a number.

    Raises:
        ConfigError: the value is not a number, or shorter than :data:`SHORTEST_LEASE_S`.
    """
    return _seconds("--moevement-lease-seconds", text, SHORTEST_LEASE_S)


def health_seconds(text: str) -> float:
    """Return the value of ``--moevement-health-seconds`` as a number.

    Raises:
        ConfigError: the value is not a number, or shorter than :data:`SHORTEST_LEASE_S`.
    """
    return _seconds(HEALTH_SECONDS, text, SHORTEST_LEASE_S)


def _seconds(name: str, text: str, least: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= least):
        raise ConfigError(f"{name} {text}; needs {least:g} seconds or more")
    return value


@dataclass(frozen=True)
class TimeoutsConfig:
    """Timeouts of a rank: how long nodes, ranks and peers may be silent.

    A node or rank that is silent for longer counts as failed. A peer that does not answer for longer is only reported.
    A node whose health check fails gives its ranks away.
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
    health_check: str | None = flag(
        HEALTH_CHECK, metavar="CMD",
        help="shell command that each node runs again and again; while it fails, the node's ranks move to spares of "
        "other nodes (needs moevement coordinate)",
    )  # fmt: skip
    health_seconds: float = flag(
        HEALTH_SECONDS, type=health_seconds, default=HEALTH_S, metavar="S",
        help=f"seconds from one run of {HEALTH_CHECK} to the next (default: {HEALTH_S:g})",
    )  # fmt: skip

    @property
    def peer_s(self) -> float:
        """Seconds without an answer after which a rank reports a peer that keeps copies of its snapshots."""
        return LEASES_TO_HANG * self.lease_s if self.peer_timeout is None else self.peer_timeout
