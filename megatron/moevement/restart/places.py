"""Places inside Megatron's step where a drill finds a rank half done: between an accumulation and its hook, and so on.

They are watched only where ``--moevement-inject`` names one of their phases; see :mod:`moevement_core.injection`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron.moevement.restart import injection
from megatron.moevement.runtime.job import Job
from megatron.moevement.state_digest import members
from moevement_core.injection import Phase


def watch(job: Job) -> None:
    """Watch the places that faults of this process name; to be called with every model that is built."""
    named = injection.phases()
    if Phase.ACCUMULATE in named:
        _watch_accumulation(job)
    if Phase.READY in named:
        for group in (group for chunk in job.model or [] for group in _bucket_groups(chunk)):
            _before(group, "register_grad_ready", Phase.READY)
    if Phase.FORK in named:
        _watch_forks()
    if Phase.COPY in named:
        for member in members(job.optimizer):
            _after(member, "_copy_model_grads_to_main_grads", Phase.COPY)


def _watch_accumulation(job: Job) -> None:
    """Autograd calls these hooks when it has accumulated, before those of Megatron's DDP."""
    for parameter in (parameter for chunk in job.model or [] for parameter in chunk.parameters()):
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _: injection.at(Phase.ACCUMULATE))


def _bucket_groups(chunk: Any) -> list[Any]:
    return [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]


def _watch_forks() -> None:
    from megatron.core.tensor_parallel import random

    original = random._set_cuda_rng_state
    if getattr(original, "_watched", False):
        return

    @functools.wraps(original)
    def set_state(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        if random.get_cuda_rng_tracker()._current_state_name != "default-rng":  # so this is the way out
            injection.at(Phase.FORK)

    set_state._watched = True  # type: ignore[attr-defined]
    random._set_cuda_rng_state = set_state


def _before(owner: Any, name: str, phase: Phase) -> None:
    original: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        injection.at(phase)
        return original(*args, **kwargs)

    setattr(owner, name, watched)


def _after(owner: Any, name: str, phase: Phase) -> None:
    original: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        injection.at(phase)
        return result

    setattr(owner, name, watched)
