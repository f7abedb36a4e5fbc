"""The optimizer step of a replayed iteration: the update that was made the first time, for active operators alone.

Frozen operators have no gradient (not a zero one, with which momentum and weight decay would still move the weights),
so Adam passes them over. What the first time was worked out from all gradients is taken from the record: whether there
was an overflow, and the norms that gradients were clipped by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.moevement.optimizer.norms import Norm, all_recorded, as_clipped_by, recorded
from megatron.moevement.optimizer.views import OperatorViews
from megatron.moevement.runtime.rooms import Rooms
from megatron.moevement.state_digest import members
from moevement_core.errors import ConfigError

UNSCALE = "_unscale_main_grads_and_check_for_nan"
Outcome = Mapping[str, Any]
"""What :func:`outcome_of` gave."""


def check_supported(optimizer: Any) -> None:
    """Refuse an optimizer whose step cannot be made again for some operators alone.

    Raises:
        ConfigError: it is not Megatron's chain of optimizers around Adam.
    """
    if not all(hasattr(optimizer, name) for name in ("prepare_grads", "get_grad_norm", "chained_optimizers")):
        raise ConfigError(
            f"--moevement-sparse-ckpt with an optimizer of type {type(optimizer).__name__}: a replay needs Megatron's "
            "ChainedOptimizer; use --optimizer adam"
        )


@dataclass
class Reduced:
    """What came of the reductions of a step, on the host: taken when each is over, because to ask for it later would
    wait for the device inside the update, where nothing may wait.
    """

    found_inf: Sequence[bool | None] = ()
    """Of each chained optimizer: it moves its own loss scale by it."""
    clip_norm: Norm = None
    """As the clipping had it: what the trainer prints was rounded on the way between stages."""
    clip_norms_by_group: Mapping[str, Norm] = field(default_factory=dict)

    def take(self, name: str, result: Any, optimizer: Any) -> None:
        """The reduction ``name`` of ``optimizer`` has given ``result``; waits for the device."""
        match name:
            case "prepare_grads":
                self.found_inf = [
                    bool(member.found_inf.item()) if getattr(member, "grad_scaler", None) is not None else None
                    for member in members(optimizer)
                ]
                self.clip_norm, self.clip_norms_by_group = None, {}
            case "get_grad_norm":
                self.clip_norm = recorded(result)
            case _:
                self.clip_norms_by_group = all_recorded(result)


def outcome_of(result: Any, reduced: Reduced) -> dict[str, Any]:
    """What a replay needs to know of a step; waits for nothing.

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
    }


class FrozenStep:
    """Changes the step of ``optimizer`` from :meth:`install` on."""

    def __init__(self, optimizer: Any, views: OperatorViews) -> None:
        self._optimizer = optimizer
        self._trained = views.trained
        self.frozen: frozenset[str] = frozenset()
        """Operators that are passed over."""
        self.outcome: Outcome | None = None
        """Of the first time; None: it is worked out again."""

    def install(self, rooms: Rooms) -> None:
        """For the time of a replay, which ``rooms`` end."""
        replaced = {
            "prepare_grads": self._prepare_grads,
            "get_grad_norm": self._get_grad_norm,
            "_compute_grad_norms_by_group": self._compute_grad_norms_by_group,
        }
        self._originals = {name: getattr(self._optimizer, name) for name in replaced}
        for name, function in replaced.items():
            rooms.put_on_instance(self._optimizer, name, function)
        for number, member in enumerate(members(self._optimizer)):
            if hasattr(member, UNSCALE):
                rooms.put_on_instance(member, UNSCALE, self._recorded_verdict(getattr(member, UNSCALE), number))

    def _recorded_verdict(self, unscale: Callable[[], bool], number: int) -> Callable[[], bool]:
        """Unscale gradients as ever; whether there was an overflow is known, and may have been seen elsewhere only."""

        def unscale_and_remember() -> bool:
            found = unscale()
            return found if self.outcome is None else bool(self.outcome["found_inf"][number])

        return unscale_and_remember

    def _prepare_grads(self) -> bool:
        found = bool(self._originals["prepare_grads"]())
        for name in self.frozen:
            for trained in self._trained.get(name, ()):
                if trained.master is not None:
                    trained.master.grad = None
                trained.parameter.grad = None
        # An overflow in the gradient of a frozen operator is not seen again.
        return found if self.outcome is None else bool(self.outcome["overflow"])

    def _get_grad_norm(self) -> Any:
        return self._originals["get_grad_norm"]() if self.outcome is None else as_clipped_by(self.outcome["clip_norm"])

    def _compute_grad_norms_by_group(self) -> Any:
        if self.outcome is None:
            return self._originals["_compute_grad_norms_by_group"]()
        norms = self.outcome["clip_norms_by_group"]
        self._optimizer.grad_norms_by_group = {name: as_clipped_by(norm) for name, norm in norms.items()}
        return self._optimizer.grad_norms_by_group


def step_counts(optimizer: Any) -> list[list[Any]]:
    """Steps as Apex's and Transformer Engine's Adam count them: one for each parameter group, all parameters together.

    Torch's Adam counts for each parameter, in its state; there the groups have none.
    """
    return [
        [group.get("step") for group in member.optimizer.param_groups]
        for member in members(optimizer)
        if getattr(member, "optimizer", None) is not None
    ]


def put_step_counts(optimizer: Any, counts: list[list[Any]]) -> None:
    """The inverse of :func:`step_counts`. From there on every step counts once, whatever is frozen."""
    inner = [member.optimizer for member in members(optimizer) if getattr(member, "optimizer", None) is not None]
    for one, of_groups in zip(inner, counts, strict=True):
        for group, count in zip(one.param_groups, of_groups, strict=True):
            if count is not None:
                group["step"] = count
