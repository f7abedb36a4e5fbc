"""Dense checkpoints of runs whose optimizer is torch's Adam, as it is without Apex and Transformer Engine.

Apex and Transformer Engine make an optimizer's state when asked for it and count steps in the parameter group. Torch
makes it at the first step and counts in each parameter's state. Megatron's checkpoints mix the two up: a fresh process
cannot load, or loads a count that is wrong from then on (weights near, bits wrong for ever). What stands here gives
every parameter the state that its first step would start from, and its own count, which comes from the group that the
checkpoint keeps it in and from nowhere else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_NO_SHARD = "no parameter of this rank"


def with_adam_state(original: Callable[..., Any]) -> Callable[..., Any]:
    """A ``sharded_state_dict`` (of a Megatron optimizer around torch's Adam) that never finds the state missing."""

    @functools.wraps(original)
    def sharded_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        make_adam_state(self.optimizer)
        return original(self, *args, **kwargs)

    return sharded_state_dict


def with_step_of_empty_shard(original: Callable[..., Any]) -> Callable[..., Any]:
    """``DistributedOptimizer.state_dict`` for a rank whose shard holds no parameter at all.

    It reads the common step count from its parameters' state and asserts that there is one. What such a rank says does
    not enter a checkpoint: data-parallel rank 0 writes the count.
    """

    @functools.wraps(original)
    def state_dict(self: Any) -> Any:
        make_adam_state(self.optimizer)
        if not isinstance(self.optimizer, torch.optim.Adam) or self.optimizer.state:
            return original(self)
        state: dict[Any, Any] = self.optimizer.state
        state[_NO_SHARD] = {"step": torch.tensor(0.0)}
        try:
            return original(self)
        finally:
            del state[_NO_SHARD]

    return state_dict


def make_adam_state(optimizer: Any) -> None:
    """Give every parameter of a torch Adam or AdamW its initial state, where it has none."""
    if not isinstance(optimizer, torch.optim.Adam):  # AdamW is one
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            if not optimizer.state.get(param):
                optimizer.state[param] = {
                    "step": torch.tensor(0.0, dtype=torch.float32),
                    "exp_avg": torch.zeros_like(param, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(param, memory_format=torch.preserve_format),
                }


def with_step_zero(original: Callable[..., Any]) -> Callable[..., Any]:
    """``load_state_dict`` (of a Megatron optimizer around torch's Adam) for a checkpoint from before the first step.

    The common step count is left out of a checkpoint when it is zero, and torch wants one.
    """

    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> Any:
        states = state_dict.get("optimizer", {}).get("state", {})
        if isinstance(self.optimizer, torch.optim.Adam) and "common_step" not in states:
            for state in states.values():
                state.setdefault("step", torch.tensor(0.0, dtype=torch.float32))
        return original(self, state_dict)

    return load_state_dict


def without_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """``DistributedOptimizer._set_main_param_and_optimizer_states`` where the tensors to set hold no step count.

    The fully reshardable format keeps one count for all parameters, set before; the setter asks each tensor for it,
    and leaves out what is no tensor. In an FP32 run what it sets is a view of the weights, a leaf of autograd.
    """

    @functools.wraps(original)
    @torch.no_grad()
    def _set_main_param_and_optimizer_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> Any:
        return original(self, model_param, {**tensors, "step": None})

    return _set_main_param_and_optimizer_states


def with_own_steps(original: Callable[..., Any]) -> Callable[..., Any]:
    """``DistributedOptimizer.load_state_dict`` that leaves every parameter its own step count.

    It hands one tensor to all parameters, and torch's Adam counts in place: after a resume each step would count once
    for every parameter of the shard, and the bias correction would be wrong from then on.
    """

    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> Any:
        result = original(self, state_dict)
        if isinstance(self.optimizer, torch.optim.Adam):
            for state in self.optimizer.state.values():
                state["step"] = state["step"].clone()
            for group in self.optimizer.param_groups:
                group.pop("step", None)  # the checkpoint's place for the count; torch's Adam would never move it
        return result

    return load_state_dict
