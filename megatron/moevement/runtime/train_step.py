"""Wrapper of Megatron's ``train_step`` that begins and ends an iteration of sparse checkpointing around it."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Any

import torch

from megatron.moevement.restart import fault_points
from megatron.moevement.runtime.job import Job, Process


def snapshot_every_iteration(process: Process, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Begin and end an iteration of sparse checkpointing around ``train_step``."""
    job = process.job
    if job.session is None:
        return original(*args, **kwargs)
    live = job.live
    # Megatron's own count of iterations also includes those that are skipped.
    bound = inspect.signature(original).bind(*args, **kwargs)
    iteration = bound.arguments.get("iteration")
    bound.arguments["forward_backward_func"] = _keeping_losses(job, bound.arguments["forward_backward_func"])
    bound.arguments["forward_step_func"] = fault_points.forward_and_backward(bound.arguments["forward_step_func"])
    committed = live.iteration = live.iteration if iteration is None else int(iteration)
    job.session.begin_iteration(committed)
    if job.loads is not None:
        job.loads.regroup_if_uneven(committed)
    began = time.perf_counter()
    result = original(*bound.args, **bound.kwargs)
    if job.loads is not None:
        job.loads.committed()
    losses, skipped, grad_norm = result[0], result[1], result[5]
    outcome = {
        "skipped": bool(skipped),
        "grad_norm": grad_norm if grad_norm is None else float(grad_norm),
        # The tensors stay on the device until the record is copied, because reading their values would wait for
        # the device.
        "losses": {name: torch.as_tensor(value).detach() for name, value in losses.items()},
    }
    job.session.end_iteration(committed + 1, time.perf_counter() - began, outcome)
    return result


def _keeping_losses(job: Job, schedule: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward and backward function that also stores its losses in the ledger.

    If a failure interrupts the rank later in the iteration, the function's result is lost, but the ledger keeps it.
    """

    def forward_backward_func(*args: Any, **kwargs: Any) -> Any:
        result = schedule(*args, **kwargs)
        job.ledger.micro_batch_losses = (job.live.iteration + 1, result)
        return result

    return forward_backward_func
