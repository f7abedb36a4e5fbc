"""Outcome of the reductions of a step: a replay, or a rank that follows, takes it from a record."""

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
"""Result of :func:`outcome_of`."""


@dataclass
class Reduced:
    """Results of reductions on the host, taken when each is over: asking later would wait for the device inside the
    update, where nothing may wait.
    """

    found_inf: Sequence[bool | None] = ()
    """Overflow of each chained optimizer, by which it moves its own loss scale."""
    clip_norm: Norm = None
    """Norm as the clipping had it: the number that the trainer prints was rounded on the way between stages."""
    clip_norms_by_group: Mapping[str, Norm] = field(default_factory=dict)
    num_tokens: int | None = None
    """Tokens of the batch, where gradients are divided by them."""
    zeros: int | None = None
    """Elements of gradients that are zero, where they are counted."""

    def take(self, name: str, result: Any, optimizer: Any) -> None:
        """The reduction ``name`` of ``optimizer`` has given ``result``; waits for the device."""
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
        """Refuse norms that are not finite; they are on the host, and the same on all ranks with a part in them.

        Raises:
            ResultError: one is not. Local gradients were validated before: their sum, or what carried it, is at fault.
        """
        for norm in (self.clip_norm, *self.clip_norms_by_group.values()):
            if norm is not None and not math.isfinite(norm):
                raise ResultError(f"the norm of the reduced gradients is {float(norm)}")


def outcome_of(result: Any, reduced: Reduced) -> dict[str, Any]:
    """Return what a replay needs to know of a step; waits for nothing.

    Args:
        result: what Megatron's ``optimizer.step()`` returned.
        reduced: what came of its reductions.
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
    """Return copies of the steps as Apex's and Transformer Engine's Adam count them: one for each parameter group.

    Torch's Adam counts for each parameter, in its state; there the groups have none. An optimizer whose step can be
    captured in a graph counts in a tensor, in place.
    """
    return [
        [_copied(group.get("step")) for group in member.optimizer.param_groups]
        for member in members(optimizer)
        if getattr(member, "optimizer", None) is not None
    ]


def put_step_counts(optimizer: Any, counts: list[list[Any]]) -> None:
    """The inverse of :func:`step_counts`. From there on every step counts once, whatever is frozen."""
    inner = [member.optimizer for member in members(optimizer) if getattr(member, "optimizer", None) is not None]
    for one, of_groups in zip(inner, counts, strict=True):
        for group, count in zip(one.param_groups, of_groups, strict=True):
            if count is None:  # no step was made, or it is torch's Adam
                group.pop("step", None)
            else:
                group["step"] = _copied(count)


def _copied(count: Any) -> Any:
    return count.clone() if torch.is_tensor(count) else count
