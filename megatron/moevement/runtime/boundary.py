"""What an iteration changes outside the optimizer step, as it stands between two iterations."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron.moevement.runtime.job import Job
from megatron.moevement.state_digest import loss_scaler, members, named_tensors, progress, random_states


def boundary_state(job: Job) -> dict[str, Any]:
    """Plain data and live tensors: random states, router buffers, loss scalers, scheduler, consumed samples.

    The tensors are to be copied before the next iteration begins; router buffers move in its forward pass already.
    """
    return {
        "rng": _compact(random_states()),
        "router_buffers": named_tensors(job, "named_buffers", lambda name: ".router." in name),
        "loss_scalers": [loss_scaler(member) for member in members(job.optimizer)],
        "scheduler": job.scheduler.state_dict() if job.scheduler is not None else None,
        "group_steps": [
            [group.get("step") for group in member.optimizer.param_groups]
            for member in members(job.optimizer)
            if getattr(member, "optimizer", None) is not None
        ],
        "progress": progress(job),
    }


def _compact(states: dict[str, Any]) -> dict[str, Any]:
    """Python's generator as an array: its 625 numbers one by one would take longer than all the rest."""
    version, numbers, gauss = states["python"]
    return {**states, "python": [version, np.array(numbers, dtype=np.uint32), gauss]}
