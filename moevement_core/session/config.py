"""How a session is configured: one dataclass for each part of it, whose fields are ``--moevement-*`` flags."""

from __future__ import annotations

import argparse
import math
import os
import socket
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from moevement_core.errors import ConfigError
from moevement_core.flags import AUTO, add_flags, at_least, bandwidth, each, flag, from_args, gigabytes, positive
from moevement_core.injection import Fault, Phase
from moevement_core.operators import OperatorTable
from moevement_core.policy.popularity import Ordering, OrderingConfig
from moevement_core.policy.reorder import ReorderThresholds
from moevement_core.policy.window import WindowKind
from moevement_core.rendezvous.coordinator import LEASE_S
from moevement_core.replication.placement import PlacementKind
from moevement_core.restart.environment import NODE_ENV
from moevement_core.snapshot.agreement import HORIZON
from moevement_core.strategies import DenseToPeers, MoEvement, Strategy

DENSE_INTERVAL = 10
"""Iterations, by default."""
SHORTEST_LEASE_S = 1.0
LEASES_TO_HANG = 6
"""For how many lease times the main thread of a rank may run nothing before it is taken to hang."""
MOST_ITERATIONS = HORIZON // 4
"""Of a window: ranks agree on runs that began up to twice that long ago, and a lag."""


class Verify(StrEnum):
    """How often a digest of the whole state is made, for a replayed state to be compared with."""

    NOTHING = "nothing"
    WINDOW = "window"
    ITERATION = "iteration"


def _iterations(name: str, text: str) -> int | None:
    if text == AUTO:
        return None
    if not text.isdecimal() or not 1 <= int(text) <= MOST_ITERATIONS:
        raise ConfigError(f"{name} {text}; needs auto or a number of iterations, 1 to {MOST_ITERATIONS}")
    return int(text)


@dataclass(frozen=True)
class StrategyConfig:
    """What is captured, and when."""

    name: str = flag(
        "--moevement-strategy", choices=[MoEvement.name, DenseToPeers.name], default=MoEvement.name,
        help="moevement: a slice of the state every iteration; dense: all of it, every --moevement-dense-interval "
        "iterations; either to peers, and recovered by the stages that lost it (default: moevement)",
    )  # fmt: skip
    dense_interval: int | None = flag(
        "--moevement-dense-interval", type=int, metavar="K",
        help="iterations from one dense snapshot to the next, for --moevement-strategy dense (default: "
        f"{DENSE_INTERVAL})",
    )  # fmt: skip
    window: int | None = flag(
        "--moevement-window", default=AUTO, metavar="auto|N", check=_iterations,
        help="iterations that a snapshot of everything is spread over; auto: the fewest that fit into the measured "
        "bandwidths (default: auto)",
    )  # fmt: skip
    window_kind: WindowKind = flag(
        "--moevement-window-kind", choices=[str(kind) for kind in WindowKind], default=str(WindowKind.ALIGNED),
        check=lambda name, value: WindowKind(value),
        help="aligned: rollback of W to 2W iterations; rolling: of W, at more bytes (default: aligned)",
    )  # fmt: skip
    order: str | None = flag(
        "--moevement-order", choices=[str(order) for order in Ordering if order is not Ordering.CAPACITY],
        help="by what operators are ordered in a window, the least first (default: hard, tokens per expert; "
        "back-to-front without experts)",
    )  # fmt: skip
    order_alpha: float = flag(
        "--moevement-order-alpha", type=float, default=0.9, metavar="A",
        help="weight of the past for --moevement-order decayed, 0 to 1 (default: 0.9)",
    )  # fmt: skip
    reorder_threshold: float = flag(
        "--moevement-reorder-threshold", type=float, default=0.10, metavar="F",
        help="relative change of an expert's activation share that counts (default: 0.10)",
    )  # fmt: skip
    reorder_fraction: float = flag(
        "--moevement-reorder-fraction", type=float, default=0.25, metavar="F",
        help="operators are reordered when more than this fraction of the experts has changed (default: 0.25)",
    )  # fmt: skip
    has_experts: bool = True
    """Whether the model has any."""

    def __post_init__(self) -> None:
        if self.window is not None and self.name != MoEvement.name:
            raise ConfigError(
                f"--moevement-window {self.window} with --moevement-strategy {self.name}; give --moevement-window "
                f"{AUTO}, or --moevement-strategy {MoEvement.name}"
            )
        if self.dense_interval is not None and self.name != DenseToPeers.name:
            raise ConfigError(
                f"--moevement-dense-interval {self.dense_interval} with --moevement-strategy {self.name}; needs "
                "--moevement-strategy dense"
            )
        if not 1 <= self.interval <= MOST_ITERATIONS:
            raise ConfigError(
                f"--moevement-dense-interval {self.interval}; needs a number of iterations, 1 to {MOST_ITERATIONS}"
            )
        _ = self.ordering, self.thresholds  # which refuse what cannot be

    @property
    def interval(self) -> int:
        """K of the strategy ``dense``, iterations."""
        return DENSE_INTERVAL if self.dense_interval is None else self.dense_interval

    @property
    def ordering(self) -> OrderingConfig:
        """By what operators are ordered."""
        default = Ordering.HARD_COUNT if self.has_experts else Ordering.BACK_TO_FRONT
        return OrderingConfig(Ordering(self.order or default), self.order_alpha)

    @property
    def thresholds(self) -> ReorderThresholds:
        """When operators are reordered."""
        return ReorderThresholds(self.reorder_threshold, self.reorder_fraction)

    def of(self, table: OperatorTable) -> Strategy:
        """Returns the strategy of a stage with these operators."""
        if self.name == DenseToPeers.name:
            return DenseToPeers(table, self.interval)
        return MoEvement(table, self.window_kind, self.window, self.ordering, self.thresholds)


@dataclass(frozen=True)
class CopiesConfig:
    """Where copies are kept."""

    replicas: int | None = flag(
        "--moevement-replicas", type=int, metavar="R", check=at_least(0),
        help="peers on other nodes that keep a copy of each snapshot "
        "(default: 2, or as many as there are other nodes; with one node on other ranks of it, with a warning)",
    )  # fmt: skip
    placement: PlacementKind = flag(
        "--moevement-placement", choices=[str(kind) for kind in PlacementKind], default=str(PlacementKind.SPREAD),
        check=lambda name, value: PlacementKind(value),
        help="spread: copies on other nodes, evenly; redundancy: on data-parallel peers first (default: spread)",
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

    def node_of(self, rank: int) -> str:
        """Returns the name of the node that ``rank``, which is this process, is on."""
        if node := os.environ.get(NODE_ENV):
            return node
        return socket.gethostname() if self.ranks_per_node is None else str(rank // self.ranks_per_node)


@dataclass(frozen=True)
class BudgetConfig:
    """What checkpointing may use: host memory and bandwidth of a rank."""

    host_memory_bytes: float = flag(
        "--moevement-host-memory-gb", type=float, metavar="GB", check=gigabytes,
        help="host memory that a rank may use for its snapshots, those it keeps for peers, and its boundary log "
        "(default: no cap)",
    )  # fmt: skip
    d2h_bytes_per_s: float | None = flag(
        "--moevement-bandwidth", default=AUTO, metavar="auto|GB/S", check=bandwidth,
        help="copies from one device to its host (default: auto, measured)",
    )  # fmt: skip
    network_bytes_per_s: float | None = flag(
        "--moevement-network-bandwidth", default=AUTO, metavar="auto|GB/S", check=bandwidth,
        help="what a rank can send to its peers beside training (default: auto, measured)",
    )  # fmt: skip
    log_memory_bytes: float = flag(
        "--moevement-log-memory-gb", type=float, metavar="GB", check=gigabytes,
        help="host memory that a rank may use to log what it sends to other pipeline stages, from which a single stage "
        "replays (default: what a replay may need, and no more than --moevement-host-memory-gb leaves)",
    )  # fmt: skip


@dataclass(frozen=True)
class DiskConfig:
    """Windows on disk."""

    persist_dir: str | None = flag(
        "--moevement-persist-dir", metavar="DIR",
        help="also write persisted windows into this folder, beside training: one for the whole job, or one on each "
        "node, which then holds the copies that its ranks keep too; {node} in the name becomes the node's",
    )  # fmt: skip
    load: str | None = flag(
        "--moevement-load", metavar="DIR",
        help="start from the newest window in this folder, if it reaches further than --load; the folder may be that "
        "of --moevement-persist-dir, and empty",
    )  # fmt: skip


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


@dataclass(frozen=True)
class VerifyConfig:
    """What a recovery is compared with."""

    verify: Verify = flag(
        "--moevement-verify", choices=[str(verify) for verify in Verify], default=str(Verify.WINDOW),
        check=lambda name, value: Verify(value),
        help="when a digest of the whole state is made, which a recovery compares the replayed state with: never, in "
        "the last iteration of a window, or in every iteration (default: window)",
    )  # fmt: skip


@dataclass(frozen=True)
class DrillConfig:
    """Failures that are made to happen."""

    wipe_at: frozenset[int] = flag(
        "--moevement-wipe-at", type=int, nargs="+", default=(), metavar="N", check=each(at_least(1), frozenset),
        help="to test recovery: when these iterations are committed, overwrite all model and optimizer memory of all "
        "ranks with NaN, recover it by replay, and compare",
    )  # fmt: skip
    wipe_stages: frozenset[int] | None = flag(
        "--moevement-wipe-stages", type=int, nargs="+", metavar="S",
        check=lambda name, values: frozenset(values) if values else None,
        help="with --moevement-wipe-at: only the ranks of these pipeline stages, which then replay alone while the "
        "others keep their state and wait (default: all)",
    )  # fmt: skip
    faults: tuple[Fault, ...] = flag(
        "--moevement-inject", action="append", default=(), metavar="rank=N,phase=P[,iteration=N][,signal=S]",
        check=each(lambda name, text: Fault.parse(text), tuple),
        help="a drill: once, let signal (KILL, STOP, EXC, or WAIT: stay there until another rank fails) happen to a "
        f"rank in a phase ({', '.join(Phase)}); may be given several times",
    )  # fmt: skip
    mtbf_s: float | None = flag(
        "--moevement-inject-mtbf", type=float, metavar="S", check=positive(None),
        help="a drill: kill ranks at random, one every so many seconds on average",
    )  # fmt: skip
    seed: int = flag(
        "--moevement-inject-seed", type=int, default=0, metavar="N", help="of the random kills (default: 0)"
    )
    trace: Path | None = flag(
        "--moevement-inject-trace", metavar="FILE", check=lambda name, value: Path(value) if value else None,
        help="a drill: kill the ranks of a node when FILE, lines of milliseconds,add|remove,NODE, removes one",
    )  # fmt: skip
    speedup: float = flag(
        "--moevement-inject-speedup", type=float, metavar="X", check=positive(1.0),
        help="let the trace run X times as fast (default: 1)",
    )  # fmt: skip


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
