"""The machines that a job runs on, as far as checkpointing is concerned. Bandwidths are in bytes per second."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moevement_core.errors import ConfigError
from moevement_core.util.numbers import AT_LEAST_ONE, POSITIVE

GB = 1e9
ASSUMED_SHARE = 0.4
"""Fraction of a node's network that copies are assumed to get where nobody has measured it, training having the rest.

At about this share the windows that MoEvement publishes for its A100 cluster follow from its network (docs/windows.md).
"""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes of one kind."""

    gpus_per_node: int
    d2h_bytes_per_s: float
    """Copies from one GPU to pinned host memory, while all GPUs of the node copy."""
    network_bytes_per_s: float
    """Rate of all NICs of a node together."""
    network_share: float = 1.0
    """Fraction of it that is left for replication beside training's own traffic."""
    copy_bytes_per_s: float | None = None
    """Measured rate of a node's copies, all its ranks sending beside training; None: the share applies."""
    host_memory_bytes: float | None = None
    """Host memory of a node, if it is to be checked."""
    storage_bytes_per_s: float | None = None
    """Rate to and from durable storage, all nodes together."""
    flops: float | None = None
    """Highest rate of a GPU in the format that it computes in, floating-point operations per second ..."""
    utilization: float = 0.4
    """... and the fraction of it that matrix products of the model reach."""
    link_bytes_per_s: float | None = None
    """Rate of a GPU to the others of its node (NVLink), one direction."""
    memory_bytes_per_s: float | None = None
    """Rate of a GPU's own memory."""
    overlap: float = 0.9
    """Fraction of gradient synchronisation and parameter gathering that hides behind computation."""
    speeds: tuple[tuple[float, int], ...] = ()
    """Relative speeds of nodes and how many have each, in the order of the nodes; left out all have the speed 1."""

    def __post_init__(self) -> None:
        AT_LEAST_ONE.check("GPUs per node", self.gpus_per_node)
        for what, value in (
            ("bandwidth from device to host", self.d2h_bytes_per_s), ("network bandwidth", self.network_bytes_per_s),
            ("copy bandwidth", self.copy_bytes_per_s),
            ("storage bandwidth", self.storage_bytes_per_s), ("host memory", self.host_memory_bytes),
            ("flops", self.flops), ("bandwidth of links", self.link_bytes_per_s),
            ("bandwidth of memory", self.memory_bytes_per_s),
        ):  # fmt: skip
            POSITIVE.check(what, value)
        if not 0.0 < self.network_share <= 1.0:
            raise ConfigError(f"a network share of {self.network_share}; needs more than 0 and at most 1")
        if not 0.0 < self.utilization <= 1.0 or not 0.0 <= self.overlap <= 1.0:
            raise ConfigError(f"utilization {self.utilization}, overlap {self.overlap}; needs fractions")
        if any(speed <= 0 or count < 1 for speed, count in self.speeds):
            raise ConfigError(f"speeds {list(self.speeds)}; needs pairs of a speed above 0 and 1 or more nodes")

    @property
    def replication_bytes_per_s(self) -> float:
        """Rate of the network for the snapshots of one GPU."""
        return self.node_copy_bytes_per_s / self.gpus_per_node

    @property
    def node_copy_bytes_per_s(self) -> float:
        """Rate of the network for the snapshots of all GPUs of a node."""
        if self.copy_bytes_per_s is not None:
            return self.copy_bytes_per_s
        return self.network_bytes_per_s * self.network_share

    def link_s(self, nbytes: float) -> float:
        """Return the seconds for which a node's links carry nothing else while each GPU sends so many bytes."""
        return nbytes * self.gpus_per_node / self.network_bytes_per_s

    def with_faster_network(self, factor: float) -> Cluster:
        """Return these machines with a network, and copies over it, that many times as fast."""
        measured = None if self.copy_bytes_per_s is None else factor * self.copy_bytes_per_s
        return replace(self, network_bytes_per_s=factor * self.network_bytes_per_s, copy_bytes_per_s=measured)

    def speed_of(self, node: int) -> float:
        """Return the speed of a node by its number; nodes that are not mentioned have the speed 1."""
        for speed, count in self.speeds:
            if node < count:
                return speed
            node -= count
        return 1.0


# Network and memory are those that MoEvement states for its two clusters (sections 5.1 and 5.7). It gives no bandwidth
# from device to host; 25 GB/s and 50 GB/s are round numbers below what PCIe 4.0 x16 (32 GB/s) and 5.0 x16 (64 GB/s) can
# carry. Neither binds in any of the paper's cases, which docs/windows.md shows. The 40 Gb/s of storage are the first
# cluster's; the second is given the same, since nothing is said of it. Links are half of the 600 and 900 GB/s that
# NVLink carries in both directions; FLOP and memory bandwidth are the data sheets' (dense BF16; 80 GB cards).
CLUSTERS: dict[str, Cluster] = {
    "moevement-a100": Cluster(
        8, 25 * GB, 80 / 8 * GB, host_memory_bytes=880 * GB, storage_bytes_per_s=40 / 8 * GB, flops=312e12,
        link_bytes_per_s=300 * GB, memory_bytes_per_s=2000 * GB,
    ),
    "moevement-h100": Cluster(
        8, 50 * GB, 200 / 8 * GB, host_memory_bytes=2100 * GB, storage_bytes_per_s=40 / 8 * GB, flops=989e12,
        link_bytes_per_s=450 * GB, memory_bytes_per_s=3350 * GB,
    ),
}  # fmt: skip
