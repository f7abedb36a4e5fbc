"""The ``--moevement-*`` flags of sparse checkpointing, as one validated object."""

from __future__ import annotations

import argparse
import math
import os
import socket
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from megatron.moevement.restart.environment import NODE_ENV
from moevement_core.errors import ConfigError
from moevement_core.injection import Fault, Phase
from moevement_core.operators import OperatorTable
from moevement_core.policy.popularity import Ordering, OrderingConfig
from moevement_core.policy.reorder import ReorderThresholds
from moevement_core.policy.window import WindowKind
from moevement_core.rendezvous.coordinator import LEASE_S
from moevement_core.replication.placement import PlacementKind
from moevement_core.snapshot.agreement import HORIZON
from moevement_core.strategies import DenseToPeers, MoEvement, Strategy

AUTO = "auto"
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


@dataclass(frozen=True)
class SparseConfig:
    """How a run saves its state every iteration; see the flags' help for each field."""

    strategy: str
    """The name of a strategy."""
    dense_interval: int
    """k of the strategy ``dense``, iterations."""
    window: int | None
    """W, or nothing for the smallest that fits."""
    window_kind: WindowKind
    ordering: OrderingConfig
    thresholds: ReorderThresholds
    replicas: int | None
    """Copies of each snapshot, or nothing for as many as the nodes allow, two at most."""
    placement: PlacementKind
    same_node: bool
    ranks_per_node: int | None
    host_memory_bytes: float
    """Of one rank; infinite without a cap."""
    d2h_bytes_per_s: float | None
    network_bytes_per_s: float | None
    """Both of one rank; nothing is measured."""
    lease_s: float
    """After so many seconds without a word of it a rank, or a node, is dead."""
    peer_timeout_s: float
    verify: Verify
    persist_dir: str | None
    """Where persisted windows are written; not at all without it."""
    load: str | None
    """Where to look for a window to start from."""
    log_memory_bytes: float
    """Of one rank, for what crosses stage boundaries; infinite without a cap."""
    wipe_at: frozenset[int]
    """Iterations after which all state is overwritten and recovered, as a test."""
    wipe_stages: frozenset[int] | None
    """The pipeline stages that this happens to; nothing for all."""
    faults: tuple[Fault, ...]
    """That are injected where a rank comes by."""
    inject_mtbf_s: float | None
    """Mean time between failures of the job that are drawn; None: none are."""
    inject_seed: int
    inject_trace: Path | None
    """Failures of nodes, by the clock."""
    inject_speedup: float
    """How much faster than in the trace."""

    def strategy_of(self, table: OperatorTable) -> Strategy:
        """The strategy of a stage with these operators."""
        if self.strategy == DenseToPeers.name:
            return DenseToPeers(table, self.dense_interval)
        return MoEvement(table, self.window_kind, self.window, self.ordering, self.thresholds)

    def node_of(self, rank: int) -> str:
        """The name of the node that ``rank``, which is this process, is on."""
        if node := os.environ.get(NODE_ENV):
            return node
        return socket.gethostname() if self.ranks_per_node is None else str(rank // self.ranks_per_node)

    @staticmethod
    def from_args(args: argparse.Namespace) -> SparseConfig | None:
        """The flags, or nothing without ``--moevement-sparse-ckpt``.

        Raises:
            ConfigError: a flag's value cannot be.
        """
        if not args.moevement_sparse_ckpt:
            return None
        dense = not args.num_experts
        default_order = Ordering.BACK_TO_FRONT if dense else Ordering.HARD_COUNT
        return SparseConfig(
            strategy=args.moevement_strategy,
            dense_interval=_interval(args.moevement_strategy, args.moevement_dense_interval),
            window=_window(args.moevement_strategy, args.moevement_window),
            window_kind=WindowKind(args.moevement_window_kind),
            ordering=OrderingConfig(Ordering(args.moevement_order or default_order), args.moevement_order_alpha),
            thresholds=ReorderThresholds(args.moevement_reorder_threshold, args.moevement_reorder_fraction),
            replicas=None
            if args.moevement_replicas is None
            else _at_least("--moevement-replicas", args.moevement_replicas, 0),
            placement=PlacementKind(args.moevement_placement),
            same_node=args.moevement_replicas_on_same_node,
            ranks_per_node=None
            if args.moevement_ranks_per_node is None
            else _at_least("--moevement-ranks-per-node", args.moevement_ranks_per_node, 1),
            host_memory_bytes=_gigabytes("--moevement-host-memory-gb", args.moevement_host_memory_gb),
            d2h_bytes_per_s=_bandwidth("--moevement-bandwidth", args.moevement_bandwidth),
            network_bytes_per_s=_bandwidth("--moevement-network-bandwidth", args.moevement_network_bandwidth),
            lease_s=args.moevement_lease_seconds,
            peer_timeout_s=_positive(
                "--moevement-peer-timeout", args.moevement_peer_timeout, LEASES_TO_HANG * args.moevement_lease_seconds
            ),
            verify=Verify(args.moevement_verify),
            persist_dir=args.moevement_persist_dir,
            load=args.moevement_load,
            log_memory_bytes=_gigabytes("--moevement-log-memory-gb", args.moevement_log_memory_gb),
            wipe_stages=frozenset(args.moevement_wipe_stages) if args.moevement_wipe_stages else None,
            faults=tuple(Fault.parse(text) for text in args.moevement_inject),
            inject_mtbf_s=None
            if args.moevement_inject_mtbf is None
            else _positive("--moevement-inject-mtbf", args.moevement_inject_mtbf, math.inf),
            inject_seed=args.moevement_inject_seed,
            inject_trace=Path(args.moevement_inject_trace) if args.moevement_inject_trace else None,
            inject_speedup=_positive("--moevement-inject-speedup", args.moevement_inject_speedup, 1.0),
            wipe_at=frozenset(_at_least("--moevement-wipe-at", at, 1) for at in args.moevement_wipe_at),
        )


def add_sparse_arguments(group: Any) -> None:
    """Add the flags to an argument group of Megatron's parser."""
    add = group.add_argument
    add(
        "--moevement-sparse-ckpt",
        action="store_true",
        help="keep a slice of the training state in host memory, and on peers, every iteration",
    )
    add(
        "--moevement-strategy",
        choices=[MoEvement.name, DenseToPeers.name],
        default=MoEvement.name,
        help="moevement: a slice of the state every iteration; dense: all of it, every --moevement-dense-interval "
        "iterations; either to peers, and recovered by the stages that lost it (default: moevement)",
    )
    add(
        "--moevement-dense-interval",
        type=int,
        metavar="K",
        help="iterations from one dense snapshot to the next, for --moevement-strategy dense (default: "
        f"{DENSE_INTERVAL})",
    )
    add(
        "--moevement-window",
        default=AUTO,
        metavar="auto|N",
        help="iterations that a snapshot of everything is spread over; auto: the fewest that fit into the measured "
        "bandwidths (default: auto)",
    )
    add(
        "--moevement-window-kind",
        choices=[str(kind) for kind in WindowKind],
        default=str(WindowKind.ALIGNED),
        help="aligned: rollback of W to 2W iterations; rolling: of W, at more bytes (default: aligned)",
    )
    add(
        "--moevement-order",
        choices=[str(ordering) for ordering in Ordering if ordering is not Ordering.CAPACITY],
        help="by what operators are ordered in a window, the least first (default: hard, tokens per expert; "
        "back-to-front without experts)",
    )
    add(
        "--moevement-order-alpha",
        type=float,
        default=0.9,
        metavar="A",
        help="weight of the past for --moevement-order decayed, 0 to 1 (default: 0.9)",
    )
    add(
        "--moevement-replicas", type=int, metavar="R", help="peers on other nodes that keep a copy of each snapshot "
        "(default: 2, or as many as there are other nodes; with one node on other ranks of it, with a warning)",
    )  # fmt: skip
    add(
        "--moevement-placement",
        choices=[str(kind) for kind in PlacementKind],
        default=str(PlacementKind.SPREAD),
        help="spread: copies on other nodes, evenly; redundancy: on data-parallel peers first (default: spread)",
    )
    add(
        "--moevement-replicas-on-same-node",
        action="store_true",
        help="let copies stay on their rank's own node where there are not enough others: they survive a process and "
        "not the node",
    )
    add(
        "--moevement-ranks-per-node",
        type=int,
        metavar="K",
        help="take every K ranks for a node of its own (default: ranks of one host are a node)",
    )
    add(
        "--moevement-reorder-threshold",
        type=float,
        default=0.10,
        metavar="F",
        help="relative change of an expert's activation share that counts (default: 0.10)",
    )
    add(
        "--moevement-reorder-fraction",
        type=float,
        default=0.25,
        metavar="F",
        help="operators are ordered anew when more than this fraction of the experts has changed (default: 0.25)",
    )
    add(
        "--moevement-host-memory-gb",
        type=float,
        metavar="GB",
        help="host memory that a rank may use for its snapshots, those it keeps for peers, and its boundary log "
        "(default: no cap)",
    )
    add(
        "--moevement-bandwidth",
        default=AUTO,
        metavar="auto|GB/S",
        help="copies from one device to its host (default: auto, measured)",
    )
    add(
        "--moevement-network-bandwidth",
        default=AUTO,
        metavar="auto|GB/S",
        help="what a rank can send to its peers beside training (default: auto, measured)",
    )
    add(
        "--moevement-peer-timeout",
        type=float,
        metavar="S",
        help="seconds after which a peer that does not answer is reported; training never waits for it (default: six "
        "lease times)",
    )
    add(
        "--moevement-lease-seconds",
        type=lease_seconds,
        default=LEASE_S,
        metavar="S",
        help="seconds without a word of it after which a node, or a rank, is lost; every other timeout of a recovery "
        f"derives from it (default: {LEASE_S:g})",
    )
    add(
        "--moevement-verify",
        choices=[str(verify) for verify in Verify],
        default=str(Verify.WINDOW),
        help="when a digest of the whole state is made, which a recovery compares the replayed state with: never, in "
        "the last iteration of a window, or in every iteration (default: window)",
    )
    add(
        "--moevement-log-memory-gb",
        type=float,
        metavar="GB",
        help="host memory that a rank may use to log what it sends to other pipeline stages, from which a single stage "
        "replays (default: what a replay may need, and no more than --moevement-host-memory-gb leaves)",
    )
    add(
        "--moevement-persist-dir",
        metavar="DIR",
        help="also write persisted windows into this folder, beside training: one for the whole job, or one on each "
        "node, which then holds the copies that its ranks keep too; {node} in the name becomes the node's",
    )
    add(
        "--moevement-load",
        metavar="DIR",
        help="start from the newest window in this folder, if it reaches further than --load; the folder may be that "
        "of --moevement-persist-dir, and empty",
    )
    add(
        "--moevement-wipe-at",
        type=int,
        nargs="+",
        default=[],
        metavar="N",
        help="to test recovery: when these iterations are committed, overwrite all model and optimizer memory of all "
        "ranks with NaN, recover it by replay, and compare",
    )
    add(
        "--moevement-wipe-stages",
        type=int,
        nargs="+",
        metavar="S",
        help="with --moevement-wipe-at: only the ranks of these pipeline stages, which then replay alone while the "
        "others keep their state and wait (default: all)",
    )
    add(
        "--moevement-inject",
        action="append",
        default=[],
        metavar="rank=N,phase=P[,iteration=N][,signal=S]",
        help="a drill: once, let signal (KILL, STOP, EXC, or WAIT: stay there until another rank fails) happen to a "
        f"rank in a phase ({', '.join(Phase)}); may be given several times",
    )
    add(
        "--moevement-inject-mtbf",
        type=float,
        metavar="S",
        help="a drill: kill ranks at random, one every so many seconds on average",
    )
    add("--moevement-inject-seed", type=int, default=0, metavar="N", help="of the random kills (default: 0)")
    add(
        "--moevement-inject-trace",
        metavar="FILE",
        help="a drill: kill the ranks of a node when FILE, lines of milliseconds,add|remove,NODE, removes one",
    )
    add(
        "--moevement-inject-speedup",
        type=float,
        metavar="X",
        help="let the trace run X times as fast (default: 1)",
    )


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


def _window(strategy: str, text: str) -> int | None:
    if text == AUTO:
        return None
    if strategy != MoEvement.name:
        raise ConfigError(
            f"--moevement-window {text} with --moevement-strategy {strategy}; give --moevement-window {AUTO}, or "
            f"--moevement-strategy {MoEvement.name}"
        )
    if not text.isdecimal() or not 1 <= int(text) <= MOST_ITERATIONS:
        raise ConfigError(f"--moevement-window {text}; needs auto or a number of iterations, 1 to {MOST_ITERATIONS}")
    return int(text)


def _interval(strategy: str, value: int | None) -> int:
    if value is not None and strategy != DenseToPeers.name:
        raise ConfigError(
            f"--moevement-dense-interval {value} with --moevement-strategy {strategy}; needs --moevement-strategy dense"
        )
    value = DENSE_INTERVAL if value is None else value
    if not 1 <= value <= MOST_ITERATIONS:
        raise ConfigError(f"--moevement-dense-interval {value}; needs a number of iterations, 1 to {MOST_ITERATIONS}")
    return value


def _bandwidth(flag: str, text: str) -> float | None:
    if text == AUTO:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{flag} {text}; needs auto or gigabytes per second, more than 0")
    return value * 1e9


def _gigabytes(flag: str, value: float | None) -> float:
    """In whole bytes, so that a number of gigabytes is not a byte short of itself; infinite without a cap."""
    value = _positive(flag, value, math.inf)
    return round(value * 1e9) if math.isfinite(value) else value


def _at_least(flag: str, value: int, least: int) -> int:
    if value < least:
        raise ConfigError(f"{flag} {value}; needs at least {least}")
    return value


def _positive(flag: str, value: float | None, default: float) -> float:
    if value is None:
        return default
    if not value > 0:
        raise ConfigError(f"{flag} {value}; needs more than 0")
    return value
