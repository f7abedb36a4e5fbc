"""Flags that set how many copies of snapshots are kept, and where."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from moevement_core.errors import ConfigError
from moevement_core.replication.placement import PlacementKind
from moevement_core.replication.protection import Protection, protection_of
from moevement_core.util.environment import NODE_ENV
from moevement_core.util.flags import at_least, flag

MOST_STREAMS = 16


def _names(flag_name: str, text: str | None) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",")) if text is not None else ()
    if not all(names):
        raise ConfigError(f"{flag_name} {text}; needs names of interfaces with commas between them")
    return names


def _streams(flag_name: str, count: int) -> int:
    if not 1 <= count <= MOST_STREAMS:
        raise ConfigError(f"{flag_name} {count}; needs 1 to {MOST_STREAMS}")
    return count


@dataclass(frozen=True)
class CopiesConfig:
    """Configuration of copies of snapshots: their number, placement and network connections."""

    replicas: int | None = flag(
        "--moevement-replicas", type=int, metavar="R", check=at_least(0),
        help="peers on other nodes that keep a copy of each snapshot "
        "(default: 2, or the number of other nodes if that is less; a job on one node keeps them on its other ranks, "
        "with a warning)",
    )  # fmt: skip
    protection: Protection = flag(
        "--moevement-protection", metavar="copies:R|parity:G+M", check=protection_of,
        help="what guards snapshots against lost nodes: R copies on other nodes, as with --moevement-replicas, or M "
        "parity blocks for each group of G ranks on different nodes; any M of the nodes with the group's ranks and "
        "blocks may be lost (default: copies)",
    )  # fmt: skip
    placement: PlacementKind | None = flag(
        "--moevement-placement", choices=[str(kind) for kind in PlacementKind],
        check=lambda name, value: None if value is None else PlacementKind(value),
        help="spread: copies on other nodes, evenly; redundancy: on data-parallel peers first; groups: nodes in groups "
        "that keep each other's copies (default: groups for --moevement-strategy gemini, else spread)",
    )  # fmt: skip
    same_node: bool = flag(
        "--moevement-replicas-on-same-node", action="store_true",
        help="let copies stay on their rank's own node where there are not enough others: they survive a process and "
        "not the node",
    )  # fmt: skip
    ranks_per_node: int | None = flag(
        "--moevement-ranks-per-node", type=int, metavar="K", check=at_least(1),
        help="take every K ranks for a node of its own (default: ranks of one host are a node)",
    )  # fmt: skip

    interfaces: tuple[str, ...] = flag(
        "--moevement-interfaces", metavar="NAME,...", check=_names,
        help="network interfaces that copies of snapshots travel over; ranks of a node take them in turn, by their "
        "local rank (default: the one that GLOO_SOCKET_IFNAME names, or that leads to the store)",
    )  # fmt: skip
    streams: int = flag(
        "--moevement-streams", type=int, default=1, metavar="N", check=_streams,
        help="connections that copies for one peer are spread over; one brings some 10 to 20 Gbit/s (default: 1)",
    )  # fmt: skip

    def __post_init__(self) -> None:
        asked, replicas = self.protection.replicas, self.replicas
        if self.protection.parity is not None and replicas is not None:
            raise ConfigError(
                f"--moevement-replicas {replicas} with --moevement-protection {self.protection.parity}; give one of "
                "them"
            )
        if asked is not None and replicas not in (None, asked):
            raise ConfigError(
                f"--moevement-replicas {replicas} with --moevement-protection copies:{asked}; give one of them"
            )
        if asked is not None:
            object.__setattr__(self, "replicas", asked)

    def node_of(self, rank: int) -> str:
        """Return the name of the node that ``rank`` is on; ``rank`` must be the rank of this process."""
        if node := os.environ.get(NODE_ENV):
            return node
        return socket.gethostname() if self.ranks_per_node is None else str(rank // self.ranks_per_node)
