"""Line of text that sums up what sparse checkpointing cost in a training run."""

from __future__ import annotations

from typing import Any

from moevement_core.util.words import counted


def cost_line(checkpointing: dict[str, Any]) -> str:
    """Return the costs in the ``checkpointing`` entry of a run's summary as one line of text."""
    costs = checkpointing
    return (
        f"sparse checkpointing: stall {costs['stall_s']:.3f} s ({costs['stall_share']:.2%} of training), "
        f"training thread {costs['training_thread_s']:.3f} s ({costs['training_thread_share']:.2%}), "
        f"{costs['copied_bytes'] / 1e6:,.0f} MB copied, {costs['replicated_bytes'] / 1e6:,.0f} MB sent, "
        f"{counted(costs['windows'], 'window')} of {counted(costs['window'], 'iteration')} "
        f"({costs['windows_abandoned']} abandoned), "
        f"{costs['memory_bytes'] / 1e6:,.0f} MB of host memory per rank"
    )
