"""What ranks of a functional test run and send back; functions of a module, so that the fork server finds them."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron.moevement.runtime.job import current_job
from megatron.moevement.worker import run_rank


def _weights(wanted: Any) -> dict[str, np.ndarray]:
    return {
        name: param.detach().float().numpy().copy()
        for chunk in current_job().model or []
        for name, param in chunk.named_parameters()
        if wanted(name, param)
    }


def expert_weights_after_one_iteration(argv: list[str]) -> dict[str, np.ndarray]:
    run_rank(argv)
    return _weights(lambda name, param: "local_experts" in name)


def replicated_weights(argv: list[str]) -> dict[str, np.ndarray]:
    run_rank(argv)
    return _weights(lambda name, param: not getattr(param, "tensor_model_parallel", False))


def draws_by_tracker(argv: list[str]) -> dict[str, list[float]]:
    """A dropout mask from each random tracker, after the same training on every rank."""
    import torch
    from megatron.core import tensor_parallel

    run_rank(argv)
    tracker = tensor_parallel.get_cuda_rng_tracker()
    draws = {}
    for name in tracker.get_states():
        with tracker.fork(name):
            draws[name] = torch.nn.functional.dropout(torch.ones(64), 0.5).tolist()
    return draws


def operators_held(argv: list[str]) -> dict[str, tuple[str, list[int]]]:
    """Kind and tensor sizes of every operator that this rank holds, and its pipeline stage and expert rank."""
    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model

    from megatron.moevement.operators import operators_of_chunk

    run_rank(argv)
    held: dict[str, tuple[str, list[int]]] = {}
    for chunk in unwrap_model(current_job().model or []):
        for operator, _, parameter in operators_of_chunk(chunk, parallel_state.get_expert_model_parallel_rank()):
            held.setdefault(operator.name, (str(operator.kind), []))[1].append(parameter.numel())
    place = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_expert_model_parallel_rank()
    return held | {"place": ("", list(place))}
