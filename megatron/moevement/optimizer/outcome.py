"""Outcome of an optimizer step's reductions, with which a replay, or a rank that follows the step, repeats the step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.moevement.optimizer.norms import Norm, all_recorded, recorded
from megatron.moevement.state_digest import members
from moevement_core.errors import ResultError

Outcome = Mapping[str, Any]
"""Results of one step's reductions (overflow flags, norms, counts), by name; :func:`outcome_of` makes it."""


@dataclass
class Reduced:
    """Results of a step's reductions. Each is copied to the host as soon as its reduction ends.

    A later copy would make the rank wait for the device inside the update section, where it must not wait.
    """

    found_inf: Sequence[bool | None] = ()
    """Overflow flag of each chained optimizer; None for an optimizer without a loss scaler."""
    clip_norm: Norm = None
    """Norm by which gradients are clipped, in full precision; Megatron's log has it rounded to FP32."""
    clip_norms_by_group: Mapping[str, Norm] = field(default_factory=dict)
    num_tokens: int | None = None
    """Number of tokens in the batch, by which gradients are divided; None without per-token loss."""
    zeros: int | None = None
    """Number of zeros in all gradients; None if the job does not log it."""

    def take(self, name: str, result: Any, optimizer: Any) -> None:
        """Copy the result of the reduction ``name`` of ``optimizer`` to the host; the call waits for the device."""
        match name:
            case "prepare_grads":
                self.found_inf = [
                    bool(member.found_inf.item()) if getattr(member, "grad_scaler", None) is not None else None
                    for member in members(optimizer)
                ]
                self.clip_norm, self.clip_norms_by_group, self.zeros = None, {}, None
            case "get_grad_norm":
                self.clip_norm = recorded(result)
            case _:
                self.clip_norms_by_group = all_recorded(result)

    def check_finite(self) -> None:
        """Refuse norms that are not finite.

        Raises:
            ResultError: a norm is not finite. All ranks that contribute to the norm raise this error. Megatron has
                validated the gradients of each rank before, so the sum over ranks or the communication is at fault.
        """
        for norm in (self.clip_norm, *self.clip_norms_by_group.values()):
            if norm is not None and not math.isfinite(norm):
                raise ResultError(f"the norm of the reduced gradients is {float(norm)}")


def outcome_of(result: Any, reduced: Reduced) -> dict[str, Any]:
    """Return the outcome of a step in the form that a replay needs, without waiting for the device.

    Args:
        result: result of Megatron's ``optimizer.step()``.
        reduced: results of the step's reductions.
    """
    successful, norm, _ = result
    return {
        "overflow": not successful and norm is None,
        "found_inf": list(reduced.found_inf),
        "clip_norm": reduced.clip_norm,
        "clip_norms_by_group": dict(reduced.clip_norms_by_group),
        "num_tokens": reduced.num_tokens,
        "zeros": reduced.zeros,
    }


def step_counts(optimizer: Any) -> list[list[Any]]:
    """Return copies of the step counts of Apex's and Transformer Engine's Adam, one for each parameter group.

    The count is None for torch's Adam, which counts steps in the state of each parameter. A count may be a tensor that
    the optimizer changes in place, if a CUDA graph can capture the optimizer's step; so the function copies it.
    """
    return [
        [_copied(group.get("step")) for group in member.optimizer.param_groups]
        for member in members(optimizer)
        if getattr(member, "optimizer", None) is not None
    ]


def put_step_counts(optimizer: Any, counts: list[list[Any]]) -> None:
    """Restore the step counts that :func:`step_counts` returned.

    A replay need not correct the counts afterwards: each step adds 1 to all of them, also for groups whose operators
    are frozen.
    """
    inner = [member.optimizer for member in members(optimizer) if getattr(member, "optimizer", None) is not None]
    for inner_optimizer, of_groups in zip(inner, counts, strict=True):
        for group, count in zip(inner_optimizer.param_groups, of_groups, strict=True):
            if count is None:  # either no step was executed, or it is torch's Adam
                group.pop("step", None)
            else:
                group["step"] = _copied(count)


def _copied(count: Any) -> Any:
    return count.clone() if torch.is_tensor(count) else count
