"""State of an optimizer of torch before its first step, which torch creates only in that step."""

from __future__ import annotations

import torch
from torch.distributed.tensor.debug import CommDebugMode

from moevement_core.errors import ConfigError
from moevement_core.trainer.fsdp import shard_of


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the state of an optimizer that has none, by a step with gradients of 0, and set the state to 0 again.

    Weights keep their bits. State that exists already stays.

    Raises:
        ConfigError: the first step leaves state that is not 0, so its value before the step is not known, or it
            communicates.
    """
    with torch.no_grad():
        new = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
            if parameter.requires_grad and not optimizer.state.get(parameter)
        ]  # fmt: skip
        if not new:
            return
        if any(group.get("dampening") for group in optimizer.param_groups):
            raise ConfigError(
                f"{type(optimizer).__name__} with dampening: its first step differs from later ones; create the "
                "state of every parameter before you make the binding"
            )
        weights = [parameter.detach().clone() for parameter in new]
        before = {id(parameter) for parameter in optimizer.state if optimizer.state[parameter]}
        for parameter in new:
            parameter.grad = torch.zeros_like(parameter)
            parameter.zero_()  # Otherwise weight decay would leave something in momentum buffers.
        with CommDebugMode() as seen:
            optimizer.step()  # Parameters with state have no gradient here, so their state and weights do not change.
        if seen.get_total_counts():
            raise ConfigError(
                f"{type(optimizer).__name__} communicates in its step, because parameters are sharded; a step must "
                "not, as a lost rank repeats it alone: take an optimizer that works on each element, such as AdamW"
            )
        optimizer.zero_grad()
        for parameter, weight in zip(new, weights, strict=True):
            parameter.copy_(weight)
        for parameter, state in optimizer.state.items():
            if id(parameter) in before:
                continue
            for name, value in state.items():
                if not isinstance(value, torch.Tensor):
                    if value is not None:
                        raise ConfigError(
                            f"{type(optimizer).__name__}: its state {name!r} is {type(value).__name__}; needs tensors, "
                            "which a snapshot can save"
                        )
                    continue
                if name != "step" and bool(shard_of(value).count_nonzero()):
                    raise ConfigError(
                        f"{type(optimizer).__name__}: its state {name!r} does not begin at 0; create the state of "
                        "every parameter before you make the binding"
                    )
                value.zero_()
