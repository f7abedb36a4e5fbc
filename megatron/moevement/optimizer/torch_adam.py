"""Dense checkpoints of runs with torch's Adam, which Megatron uses without Apex and Transformer Engine.

Apex and Transformer Engine create an optimizer's state on request, and count steps in the parameter group. Torch
creates the state at the first step, and counts steps in each parameter's state. Megatron's checkpoints mix the two
conventions: a fresh process fails to load a checkpoint, or loads a wrong step count, which makes all later weights
slightly wrong.

The functions here give every parameter its initial state and a separate step count, which they take from the place
where the checkpoint has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_NO_SHARD = "no parameter of this rank"


def save_adam_state(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Create the state that torch's Adam creates at its first step, before ``sharded_state_dict``."""
    make_adam_state(self.optimizer)
    return original(self, *args, **kwargs)


def save_step_of_empty_shard(original: Callable[..., Any], self: Any) -> Any:
    """Save also on a rank whose shard has no parameter, in place of ``DistributedOptimizer.state_dict``.

    Megatron's original reads the step count from the state of the rank's parameters, and asserts that there is a count.
    The function supplies a count of zero. The zero does not enter a checkpoint, which gets the count of data-parallel
    rank 0.
    """
    make_adam_state(self.optimizer)
    if not isinstance(self.optimizer, torch.optim.Adam) or self.optimizer.state:
        return original(self)
    state: dict[Any, Any] = self.optimizer.state
    state[_NO_SHARD] = {"step": torch.tensor(0.0)}
    try:
        return original(self)
    finally:
        del state[_NO_SHARD]


def make_adam_state(optimizer: Any) -> None:
    """Give every parameter of a torch Adam or AdamW its initial state, if it has none."""
    if not isinstance(optimizer, torch.optim.Adam):  # AdamW is a subclass
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            if not optimizer.state.get(param):
                optimizer.state[param] = {
                    "step": torch.tensor(0.0, dtype=torch.float32),
                    "exp_avg": torch.zeros_like(param, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(param, memory_format=torch.preserve_format),
                }


def load_step_zero(original: Callable[..., Any], self: Any, state_dict: Any) -> Any:
    """Supply a missing step count for torch's Adam, in place of ``load_state_dict``.

    A checkpoint from before the first step has no step count, because Megatron leaves out a count of zero.
    """
    states = state_dict.get("optimizer", {}).get("state", {})
    if isinstance(self.optimizer, torch.optim.Adam) and "common_step" not in states:
        for state in states.values():
            state.setdefault("step", torch.tensor(0.0, dtype=torch.float32))
    return original(self, state_dict)


@torch.no_grad()
def load_without_step(original: Callable[..., Any], self: Any, model_param: Any, tensors: dict[str, Any]) -> Any:
    """Load without a step count per tensor, in place of ``_set_main_param_and_optimizer_states``.

    Megatron's original expects a step count for each tensor. But checkpoints in the fully reshardable format have one
    count for all parameters, which Megatron sets earlier. So the function passes None as the count, which the original
    skips. The function also runs the original under ``no_grad``. With FP32 weights, the original writes into a view of
    the weights, which autograd permits only there.
    """
    return original(self, model_param, {**tensors, "step": None})


def load_own_steps(original: Callable[..., Any], self: Any, state_dict: Any) -> Any:
    """Give every parameter its own step count, in place of ``DistributedOptimizer.load_state_dict``.

    Megatron's original gives all parameters the same tensor as their count, and torch's Adam counts in place. After a
    resume, each step would add 1 to this tensor for every parameter of the shard, and all later bias corrections would
    be wrong.
    """
    result = original(self, state_dict)
    if isinstance(self.optimizer, torch.optim.Adam):
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()
        for group in self.optimizer.param_groups:
            group.pop("step", None)  # The checkpoint keeps the count here, but torch's Adam would never advance it.
    return result
