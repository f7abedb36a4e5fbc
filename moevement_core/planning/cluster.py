"""Description of a job's machines, as far as checkpointing depends on them. Bandwidths are in bytes per second."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moevement_core.errors import ConfigError
from moevement_core.util.numbers import AT_LEAST_ONE, POSITIVE

GB = 1e9
ASSUMED_SHARE = 0.4
"""Fraction of a node's network bandwidth that a plan assumes for copies to peers if nobody has measured it.

Training gets the rest. With about this fraction, planning reproduces the windows that MoEvement publishes for its A100
cluster (docs/windows.md).
"""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Cluster of nodes with the same hardware."""

    gpus_per_node: int
    d2h_bytes_per_s: float
    """Bytes per second from one GPU to pinned host memory while all GPUs of the node copy."""
    network_bytes_per_s: float
    """Bytes per second of all NICs of a node together."""
    network_share: float = 1.0
    """Fraction of the network bandwidth that training leaves for replication."""
    copy_bytes_per_s: float | None = None
    """Measured bytes per second of a node's copies to peers, while all its ranks send and train. None: not measured;
    ``network_share`` applies."""
    host_memory_bytes: float | None = None
    """Bytes of host memory of a node; None: the plan does not check memory."""
    storage_bytes_per_s: float | None = None
    """Bytes per second to and from durable storage, for all nodes together."""
    flops: float | None = None
    """Peak floating-point operations per second of a GPU in its compute format."""
    utilization: float = 0.4
    """Fraction of ``flops`` that the model's matrix products reach."""
    link_bytes_per_s: float | None = None
    """Bytes per second between a GPU and the other GPUs of its node (NVLink), in one direction."""
    memory_bytes_per_s: float | None = None
    """Bytes per second of a GPU's own memory."""
    overlap: float = 0.9
    """Fraction of gradient synchronisation and parameter gathering that overlaps with computation."""
    speeds: tuple[tuple[float, int], ...] = ()
    """Pairs of a relative speed and a number of nodes with this speed, in the order of nodes. All further nodes have
    speed 1."""

    def __post_init__(self) -> None:
        AT_LEAST_ONE.check("GPUs per node", self.gpus_per_node)
        for quantity, value in (
            ("bandwidth from device to host", self.d2h_bytes_per_s), ("network bandwidth", self.network_bytes_per_s),
            ("copy bandwidth", self.copy_bytes_per_s),
            ("storage bandwidth", self.storage_bytes_per_s), ("host memory", self.host_memory_bytes),
            ("flops", self.flops), ("bandwidth of links", self.link_bytes_per_s),
            ("bandwidth of memory", self.memory_bytes_per_s),
        ):  # fmt: skip
            POSITIVE.check(quantity, value)
        if not 0.0 < self.network_share <= 1.0:
            raise ConfigError(f"a network share of {self.network_share}; needs more than 0 and at most 1")
        if not 0.0 < self.utilization <= 1.0 or not 0.0 <= self.overlap <= 1.0:
            raise ConfigError(
                f"utilization {self.utilization} and overlap {self.overlap}; utilization has to be more than 0 and at "
                "most 1, and overlap 0 to 1"
            )
        if any(speed <= 0 or count < 1 for speed, count in self.speeds):
            raise ConfigError(
                f"speeds {list(self.speeds)}; each pair needs a speed above 0 and a number of nodes of 1 or more"
            )

    @property
    def replication_bytes_per_s(self) -> float:
        """Bytes per second that the network carries for the snapshots of one GPU."""
        return self.node_copy_bytes_per_s / self.gpus_per_node

    @property
    def node_copy_bytes_per_s(self) -> float:
        """Bytes per second that the network carries for the snapshots of all GPUs of a node."""
        if self.copy_bytes_per_s is not None:
            return self.copy_bytes_per_s
        return self.network_bytes_per_s * self.network_share

    def link_s(self, nbytes: float) -> float:
        """Return the seconds that a node's links need for ``nbytes`` from each of its GPUs, without other traffic."""
        return nbytes * self.gpus_per_node / self.network_bytes_per_s

    def fetch_s(self, nbytes: float) -> float:
        """Return the seconds in which a rank fetches ``nbytes`` from one peer, and copies them to its device."""
        return nbytes / min(self.replication_bytes_per_s, self.d2h_bytes_per_s)

    def with_faster_network(self, factor: float) -> Cluster:
        """Return this cluster with network bandwidth, and measured bandwidth of copies, multiplied by ``factor``."""
        measured = None if self.copy_bytes_per_s is None else factor * self.copy_bytes_per_s
        return replace(self, network_bytes_per_s=factor * self.network_bytes_per_s, copy_bytes_per_s=measured)

    def speed_of(self, node: int) -> float:
        """Return the relative speed of a node by its number; nodes beyond ``speeds`` have speed 1."""
        for speed, count in self.speeds:
            if node < count:
                return speed
            node -= count
        return 1.0


# MoEvement states network and memory of its two clusters (sections 5.1 and 5.7). It states no bandwidth from device to
# host; 25 GB/s and 50 GB/s are round numbers below the limits of PCIe 4.0 x16 (32 GB/s) and 5.0 x16 (64 GB/s). These
# bandwidths limit none of the paper's cases, as docs/windows.md shows. The paper states 40 Gb/s of storage for the
# first cluster and no storage for the second; here the second cluster has 40 Gb/s too. Bandwidths of links are half of
# the 600 and 900 GB/s that NVLink carries in both directions together. FLOP and memory bandwidth come from the data
# sheets (dense BF16; 80 GB cards).
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
