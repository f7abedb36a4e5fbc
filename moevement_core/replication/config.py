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
        raise ConfigError(f"{flag_name} {text}; needs the names of network interfaces, separated by commas")
    return names


def _streams(flag_name: str, count: int) -> int:
    if not 1 <= count <= MOST_STREAMS:
        raise ConfigError(f"{flag_name} {count}; needs a number from 1 to {MOST_STREAMS}")
    return count


@dataclass(frozen=True)
class CopiesConfig:
    """Configuration of copies of snapshots: their number, placement and network connections."""

    replicas: int | None = flag(
        "--moevement-replicas", type=int, metavar="R", check=at_least(0),
        help="number of peers on other nodes that keep a copy of each snapshot "
        "(default: 2, or the number of other nodes if that is less; a job on a single node keeps the copies on other "
        "ranks of this node and logs a warning)",
    )  # fmt: skip
    protection: Protection = flag(
        "--moevement-protection", metavar="copies:R|parity:G+M", check=protection_of,
        help="protection of snapshots against the loss of nodes. copies:R: R copies of each snapshot on other nodes, "
        "like --moevement-replicas R; parity:G+M: M parity blocks for each group of G ranks on different nodes; a "
        "group survives the loss of any M nodes that hold its ranks or blocks (default: copies)",
    )  # fmt: skip
    placement: PlacementKind | None = flag(
        "--moevement-placement", choices=[str(kind) for kind in PlacementKind],
        check=lambda name, value: None if value is None else PlacementKind(value),
        help="choice of the peers that keep copies. spread: ranks on other nodes, with even load; redundancy: "
        "data-parallel peers first; groups: nodes form groups, and the nodes of a group keep each other's copies "
        "(default: groups for --moevement-strategy gemini, redundancy for moetion, else spread)",
    )  # fmt: skip
    same_node: bool = flag(
        "--moevement-replicas-on-same-node", action="store_true",
        help="allow copies on the rank's own node if there are too few other nodes; such copies survive the loss of a "
        "process, but not the loss of the node",
    )  # fmt: skip
    ranks_per_node: int | None = flag(
        "--moevement-ranks-per-node", type=int, metavar="K", check=at_least(1),
        help="treat every K consecutive ranks as one node (default: all ranks of a host are one node)",
    )  # fmt: skip

    interfaces: tuple[str, ...] = flag(
        "--moevement-interfaces", metavar="NAME,...", check=_names,
        help="network interfaces over which copies of snapshots are sent; ranks of a node use them in turn, by local "
        "rank (default: the interface in GLOO_SOCKET_IFNAME, or else the interface that reaches the store)",
    )  # fmt: skip
    streams: int = flag(
        "--moevement-streams", type=int, default=1, metavar="N", check=_streams,
        help="number of connections over which the copies for one peer are spread; one connection carries about 10 to "
        "20 Gbit/s (default: 1)",
    )  # fmt: skip

    def __post_init__(self) -> None:
        asked, replicas = self.protection.replicas, self.replicas
        if self.protection.parity is not None and replicas is not None:
            raise ConfigError(
                f"--moevement-replicas {replicas} contradicts --moevement-protection {self.protection.parity}; give "
                "only one of these flags"
            )
        if asked is not None and replicas not in (None, asked):
            raise ConfigError(
                f"--moevement-replicas {replicas} contradicts --moevement-protection copies:{asked}; give only one of "
                "these flags"
            )
        if asked is not None:
            object.__setattr__(self, "replicas", asked)

    def node_of(self, rank: int) -> str:
        """Return the name of this process's node.

        Args:
            rank: rank of this process. It decides the node if ``--moevement-ranks-per-node`` is set.
        """
        if node := os.environ.get(NODE_ENV):
            return node
        return socket.gethostname() if self.ranks_per_node is None else str(rank // self.ranks_per_node)
