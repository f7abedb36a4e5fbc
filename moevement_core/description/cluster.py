"""The machines that a job runs on, as far as checkpointing is concerned. Bandwidths are in bytes per second."""

from __future__ import annotations

from dataclasses import dataclass

from moevement_core.errors import ConfigError

GB = 1e9


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes of one kind."""

    gpus_per_node: int
    d2h_bytes_per_s: float
    """Copies from one GPU to pinned host memory, while all GPUs of the node copy."""
    network_bytes_per_s: float
    """What all NICs of a node send together."""
    network_share: float = 1.0
    """Fraction of it that is left for replication beside training's own traffic."""
    host_memory_bytes: float | None = None
    """Host memory of a node, if it is to be checked."""

    def __post_init__(self) -> None:
        if self.gpus_per_node < 1:
            raise ConfigError(f"{self.gpus_per_node} GPUs per node; needs at least 1")
        if not 0.0 < self.network_share <= 1.0:
            raise ConfigError(f"a network share of {self.network_share}; needs more than 0 and at most 1")

    @property
    def replication_bytes_per_s(self) -> float:
        """What the network carries for the snapshots of one GPU."""
        return self.network_bytes_per_s * self.network_share / self.gpus_per_node


# Network and memory are those that MoEvement states for its two clusters (sections 5.1 and 5.7). It gives no bandwidth
# from device to host; 25 GB/s and 50 GB/s are round numbers below what PCIe 4.0 x16 (32 GB/s) and 5.0 x16 (64 GB/s) can
# carry. Neither binds in any of the paper's cases, which docs/windows.md shows.
CLUSTERS: dict[str, Cluster] = {
    "moevement-a100": Cluster(8, 25 * GB, 80 / 8 * GB, host_memory_bytes=880 * GB),
    "moevement-h100": Cluster(8, 50 * GB, 200 / 8 * GB, host_memory_bytes=2100 * GB),
}
