"""What sparse checkpointing cost a run, in a line."""

from __future__ import annotations

from typing import Any

from moevement_core.words import counted


def cost_line(checkpointing: dict[str, Any]) -> str:
    """From the ``checkpointing`` of a run's summary."""
    told = checkpointing
    return (
        f"sparse checkpointing: stall {told['stall_s']:.3f} s ({told['stall_share']:.2%} of training), "
        f"training thread {told['training_thread_s']:.3f} s ({told['training_thread_share']:.2%}), "
        f"{told['copied_bytes'] / 1e6:,.0f} MB copied, {told['replicated_bytes'] / 1e6:,.0f} MB sent, "
        f"{counted(told['windows'], 'window')} of {counted(told['window'], 'iteration')} "
        f"({told['windows_abandoned']} abandoned), "
        f"{told['memory_bytes'] / 1e6:,.0f} MB of host memory a rank"
    )
