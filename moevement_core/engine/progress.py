"""Where one rank's checkpointing stands."""

from __future__ import annotations

from dataclasses import dataclass

from moevement_core.snapshot.agreement import NONE


@dataclass(slots=True)
class Progress:
    """What checkpointing did in the last iteration, and where it stands."""

    copied_bytes: int = 0
    stall_s: float = 0.0
    gradient_stall_s: float = 0.0
    """Before gradients were cleared, until they were copied; beside ``stall_s``."""
    copy_s: float = 0.0
    copy_cpu_s: float = 0.0
    digest_cpu_s: float = 0.0
    """Processor time of the background thread: copies of this iteration, digests of the last one."""
    replicated_bytes: int = 0
    """Payload bytes that peers acknowledged in the last iteration, all peers together."""
    lag: int = 0
    """Iterations by which the newest snapshot that all peers have trails the newest captured one."""
    whole_cpu_s: float = 0.0
    """Likewise for digests of the whole state."""
    persisted: int = NONE
    """Where the newest run begins that is persisted on every rank; ``NONE`` if there is none."""
    abandoned: int = 0
    """Windows abandoned so far."""
    memory_bytes: int = 0
    """Host memory set aside for own snapshots and for those kept for others."""
    is_winding_down: bool = False
    """Whether all ranks know that the job is to end after the iteration that begins now."""
