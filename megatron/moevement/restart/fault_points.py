"""Fault injection at points inside a training step, for tests; for example, after a gradient is accumulated.

This module changes Megatron's objects only if ``--moevement-inject`` names a phase at one of these points; see
:mod:`moevement_core.restart.faults`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron.moevement.patches import replace_on
from megatron.moevement.runtime.live import Live
from megatron.moevement.state_digest import members
from moevement_core.restart import injection
from moevement_core.restart.faults import Phase


def watch(live: Live) -> None:
    """Add hooks at the points that ``--moevement-inject`` names; called for every model that is built."""
    named = injection.phases()
    if Phase.ACCUMULATE in named:
        _watch_accumulation(live)
    if Phase.READY in named:
        for group in (group for chunk in live.model or [] for group in _bucket_groups(chunk)):
            replace_on(group, "register_grad_ready", functools.partial(inject_before, Phase.READY))
    if Phase.FORK in named:
        _watch_forks()
    if Phase.COPY in named:
        for member in members(live.optimizer):
            replace_on(member, "_copy_model_grads_to_main_grads", functools.partial(_inject_after, Phase.COPY))


def _watch_accumulation(live: Live) -> None:
    """Register hooks that autograd calls after it accumulated a gradient, before the hooks of Megatron's DDP."""
    for parameter in (parameter for chunk in live.model or [] for parameter in chunk.parameters()):
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _: injection.at(Phase.ACCUMULATE))


def _bucket_groups(chunk: Any) -> list[Any]:
    return [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]


@functools.cache
def _watch_forks() -> None:
    from megatron.core.tensor_parallel import random

    def set_state(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        if random.get_cuda_rng_tracker()._current_state_name != "default-rng":  # true only during a fork's exit
            injection.at(Phase.FORK)

    replace_on(random, "_set_cuda_rng_state", set_state)


def _inject_after(phase: Phase, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = original(*args, **kwargs)
    injection.at(phase)
    return result


def inject_before(phase: Phase, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Inject the faults that name ``phase``, before a function of Megatron."""
    injection.at(phase)
    return original(*args, **kwargs)


def forward_and_backward(forward_step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward step function that injects the faults which name its forward or its backward pass."""
    if not injection.is_armed():
        return forward_step

    @functools.wraps(forward_step)
    def injected(*args: Any, **kwargs: Any) -> Any:
        injection.at(Phase.FORWARD)
        result = forward_step(*args, **kwargs)
        output = result[0]
        if torch.is_tensor(output) and output.requires_grad:
            output.register_hook(lambda gradient: injection.at(Phase.BACKWARD))
        return result

    return injected
