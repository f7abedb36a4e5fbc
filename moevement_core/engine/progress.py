"""Counters of the cost and the progress of checkpointing on one rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class CheckpointCounters:
    """Counters of one rank's checkpointing: costs of the last iteration, and totals of the job."""

    copied_bytes: int = 0
    stall_s: float = 0.0
    gradient_stall_s: float = 0.0
    """Seconds that training waited for copies of gradients before it cleared the gradients; not part of ``stall_s``."""
    copy_s: float = 0.0
    copy_cpu_s: float = 0.0
    """Processor seconds of the capture thread for this iteration's copies and for digests of the whole state."""
    digest_cpu_s: float = 0.0
    """Processor seconds of the capture thread for digests of the tensors in the last iteration's snapshot."""
    replicated_bytes: int = 0
    """Payload bytes that peers acknowledged in the last iteration, added over all peers."""
    lag: int = 0
    """Iterations from the newest snapshot that all peers have to the newest captured snapshot."""
    whole_cpu_s: float = 0.0
    """Processor seconds for digests of the whole state; ``copy_cpu_s`` includes them."""
    persisted: int | None = None
    """First snapshot of the newest run that is persisted on every rank; None if there is none."""
    abandoned: int = 0
    """Windows abandoned so far."""
    memory_bytes: int = 0
    """Bytes of host memory set aside for own snapshots and for copies of other ranks' snapshots."""
    is_winding_down: bool = False
    """True if all ranks have agreed to end the job after the iteration that begins now."""
