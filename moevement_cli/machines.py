"""Flags of ``moevement plan``, ``simulate`` and ``advise`` that describe the machines of a job."""

from __future__ import annotations

import argparse
from dataclasses import replace

from moevement_core.errors import ConfigError
from moevement_core.planning.cluster import ASSUMED_SHARE, CLUSTERS, GB, Cluster
from moevement_core.policy.window import WindowKind
from moevement_core.precision import PRESETS, Scaling


def add_machines(parser: argparse.ArgumentParser, *, has_defaults: bool = True) -> None:
    """Add the flags of machines and snapshots.

    With ``has_defaults=False`` a flag that the user leaves out is None, and the value of the scenario remains.
    """
    parser.add_argument(
        "--cluster", metavar="NAME", help=f"a cluster of the paper: {', '.join(CLUSTERS)}; flags below override it"
    )
    parser.add_argument(
        "--d2h-bandwidth", type=float, metavar="GB/S", help="bandwidth of one GPU to its host while all GPUs copy"
    )
    parser.add_argument(
        "--copy-bandwidth",
        type=float,
        metavar="GB/S",
        help="bandwidth of copies over TCP while the job trains, all ranks of a node together; measure it "
        "(docs/sizing.md), because it is far below the speed of the NICs",
    )
    parser.add_argument(
        "--network-bandwidth",
        type=float,
        metavar="GB/S",
        help="in place of a measurement: bandwidth of all NICs of a node together; copies get --network-share of this",
    )
    parser.add_argument(
        "--network-share",
        type=float,
        metavar="F",
        help=f"share of --network-bandwidth that copies get (default: {ASSUMED_SHARE:g}, assumed: docs/sizing.md)",
    )
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="GPUs per node")
    parser.add_argument("--host-memory", type=float, metavar="GB", help="host memory of a node, as a limit")
    parser.add_argument(
        "--replicas",
        type=int,
        metavar="R",
        help="peers that keep a copy of each snapshot (default: 2)",
    )
    parser.add_argument(
        "--protection", metavar="copies:R|parity:G+M", help="value of --moevement-protection (default: copies)"
    )
    parser.add_argument(
        "--keep-own", choices=("always", "never"), default="always" if has_defaults else None,
        help="never: a rank frees its snapshot once all peers have a copy (default: always)",
    )  # fmt: skip
    parser.add_argument(
        "--window-kind",
        choices=[str(kind) for kind in WindowKind],
        default="aligned" if has_defaults else None,
        help="kind of window (default: aligned)",
    )
    parser.add_argument("--window", type=int, metavar="W", help="iterations of a window (default: the fewest possible)")
    parser.add_argument(
        "--regime",
        metavar="R",
        help=f"number formats of the state: {', '.join(PRESETS)}, or compute/master/moments such as FP8/FP16/FP8+FP16 "
        "(default: those of the model)",
    )
    parser.add_argument(
        "--fp8-scaling",
        choices=[str(scaling) for scaling in Scaling],
        help="values that share one FP8 scale: a tensor, a block of 128 x 128, or 32 elements (default: the model's)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")


def cluster_of(arguments: argparse.Namespace) -> Cluster:
    """Return the machines that the command line describes.

    Raises:
        ConfigError: the command line describes no machines.
    """
    network = arguments.network_bandwidth if arguments.copy_bandwidth is None else arguments.copy_bandwidth
    if arguments.cluster is not None:
        cluster = replace(preset(arguments.cluster), network_share=ASSUMED_SHARE)
    elif None in (arguments.d2h_bandwidth, network, arguments.gpus_per_node):
        raise ConfigError(
            "neither --cluster nor all of --d2h-bandwidth, --copy-bandwidth and --gpus-per-node was given; give "
            f"--cluster {' or '.join(CLUSTERS)}, or the other three flags"
        )
    else:
        cluster = Cluster(1, 1.0, 1.0, network_share=ASSUMED_SHARE)
    return overridden(cluster, arguments)


def preset(name: str) -> Cluster:
    """Return the machines of a preset.

    Raises:
        ConfigError: no preset has this name.
    """
    if name not in CLUSTERS:
        raise ConfigError(
            f"--cluster {name}: no cluster has this name; give {' or '.join(CLUSTERS)}, or --gpus-per-node, "
            "--d2h-bandwidth and --copy-bandwidth in its place"
        )
    return CLUSTERS[name]


def overridden(cluster: Cluster, arguments: argparse.Namespace) -> Cluster:
    """Return ``cluster`` with the values of the command line.

    Raises:
        ConfigError: the command line gives the bandwidth of copies twice, or a number is out of range.
    """
    if arguments.copy_bandwidth is not None and arguments.network_share is not None:
        raise ConfigError(
            f"--copy-bandwidth {arguments.copy_bandwidth:g} and --network-share {arguments.network_share:g} both set "
            "the bandwidth of copies; give --copy-bandwidth if you measured it, else --network-share"
        )
    values = {
        "gpus_per_node": arguments.gpus_per_node,
        "d2h_bytes_per_s": _gigabytes(arguments.d2h_bandwidth),
        "network_bytes_per_s": _gigabytes(arguments.network_bandwidth),
        "network_share": arguments.network_share,
        "copy_bytes_per_s": _gigabytes(arguments.copy_bandwidth),
        "host_memory_bytes": _gigabytes(arguments.host_memory),
        "storage_bytes_per_s": _gigabytes(getattr(arguments, "storage_bandwidth", None)),
    }
    if arguments.network_share is not None:
        cluster = replace(cluster, copy_bytes_per_s=None)  # a scenario file may have set it
    return replace(cluster, **{name: value for name, value in values.items() if value is not None})


def copies_get(cluster: Cluster) -> str:
    """Return words that say how much bandwidth copies get per node, and where the number comes from."""
    rate = f"copies get {cluster.node_copy_bytes_per_s / GB:.3g} GB/s of a node"
    if cluster.copy_bytes_per_s is not None:
        return f"{rate} (as given)"
    return (
        f"{rate} (assumed: {cluster.network_share:g} of the node's {cluster.network_bytes_per_s / GB:.3g} GB/s; "
        "measure it, and give --copy-bandwidth)"
    )


def _gigabytes(value: float | None) -> float | None:
    return None if value is None else value * GB
