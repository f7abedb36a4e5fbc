"""The machines of a job, as flags of ``moevement plan`` and ``simulate``."""

from __future__ import annotations

import argparse
from dataclasses import replace

from moevement_core.description.cluster import CLUSTERS, GB, Cluster
from moevement_core.errors import ConfigError
from moevement_core.policy.window import WindowKind
from moevement_core.precision import PRESETS, Scaling


def add_machines(parser: argparse.ArgumentParser, *, has_defaults: bool = True) -> None:
    """What is planned or simulated beside the job; without defaults, what is left out is a scenario's."""
    parser.add_argument("--cluster", choices=tuple(CLUSTERS), help="machines of the paper; what you give below wins")
    parser.add_argument(
        "--d2h-bandwidth", type=float, metavar="GB/S", help="copies of one GPU to its host, all GPUs copying"
    )
    parser.add_argument("--network-bandwidth", type=float, metavar="GB/S", help="what all NICs of a node send together")
    parser.add_argument(
        "--network-share", type=float, metavar="F", help="fraction left for replication beside training (default: 1)"
    )
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="GPUs of a node")
    parser.add_argument("--host-memory", type=float, metavar="GB", help="host memory of a node, to be checked")
    parser.add_argument(
        "--replicas",
        type=int,
        default=2 if has_defaults else None,
        metavar="R",
        help="peers that keep a copy (default: 2)",
    )
    parser.add_argument(
        "--protection", metavar="copies:R|parity:G+M", help="as --moevement-protection has it (default: copies)"
    )
    parser.add_argument(
        "--keep-own", choices=("always", "never"), default="always" if has_defaults else None,
        help="whether ranks keep snapshots of their own that all peers have (default: always)",
    )  # fmt: skip
    parser.add_argument(
        "--window-kind",
        choices=[str(kind) for kind in WindowKind],
        default="aligned" if has_defaults else None,
        help="default: aligned",
    )
    parser.add_argument("--window", type=int, metavar="W", help="impose a window (default: the smallest that fits)")
    parser.add_argument(
        "--regime",
        metavar="R",
        help=f"{', '.join(PRESETS)}, or compute/master/moments as FP8/FP16/FP8+FP16 (default: what the flags say)",
    )
    parser.add_argument(
        "--fp8-scaling",
        choices=[str(scaling) for scaling in Scaling],
        help="a scale for each tensor, 128 x 128 block, or 32 elements (default: what the flags say)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")


def cluster_of(arguments: argparse.Namespace) -> Cluster:
    """The machines that the command line describes.

    Raises:
        ConfigError: it describes none.
    """
    if arguments.cluster is not None:
        cluster = CLUSTERS[arguments.cluster]
    elif None in (arguments.d2h_bandwidth, arguments.network_bandwidth, arguments.gpus_per_node):
        raise ConfigError(
            "neither --cluster nor all of --d2h-bandwidth, --network-bandwidth and --gpus-per-node; give "
            f"--cluster {' or '.join(CLUSTERS)}, or your own three numbers"
        )
    else:
        cluster = Cluster(arguments.gpus_per_node, 1.0, 1.0)
    given = {
        "gpus_per_node": arguments.gpus_per_node,
        "d2h_bytes_per_s": _gigabytes(arguments.d2h_bandwidth),
        "network_bytes_per_s": _gigabytes(arguments.network_bandwidth),
        "network_share": arguments.network_share,
        "host_memory_bytes": _gigabytes(arguments.host_memory),
    }
    return replace(cluster, **{name: value for name, value in given.items() if value is not None})


def _gigabytes(value: float | None) -> float | None:
    return None if value is None else value * GB
