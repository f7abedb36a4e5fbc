"""Boundary state of another rank, beside the optimizer's state, fitted to this one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.moevement.elastic.slots import slots
from megatron.moevement.optimizer.outcome import step_counts
from megatron.moevement.state_digest import members, random_states


def fitted(boundary: Mapping[str, Any], optimizer: Any) -> dict[str, Any]:
    """Returns the boundary state of a rank of the same stage, converted so that this rank can restore it.

    With one data-parallel rank Megatron has a single optimizer, where it otherwise has a second one for experts. If
    their number has changed, the first one's loss scaler is used for all.
    """
    scalers = list(boundary["loss_scalers"])
    count = len(members(optimizer))
    if len(scalers) != count:
        scalers = [scalers[0]] * count
    steps = {step for of_member in boundary["group_steps"] for step in of_member if step is not None}
    step = max(steps, default=None)  # of all parameters together, so the same in every group
    return {
        **boundary,
        "rng": _with_own_expert_draws(boundary["rng"]),
        "loss_scalers": scalers,
        "group_steps": [[step] * len(of_member) for of_member in step_counts(optimizer)],
    }


def fitted_record(record: Mapping[str, Any], optimizer: Any, *, is_comparable: bool) -> dict[str, Any]:
    """Return the outcome of an iteration in the form that this rank can use.

    Args:
        record: of a rank of its stage.
        optimizer: Megatron's.
        is_comparable: whether what comes of the iteration has the same bits now; otherwise nothing is to be compared.
    """
    if not record:
        return {}
    kept = {name: value for name, value in record.items() if is_comparable or name != "losses"}
    kept.pop("sent", None)  # to other ranks, in other pieces
    if "step" not in kept:
        return kept
    found, count = list(kept["step"]["found_inf"]), len(members(optimizer))
    if len(found) != count:
        found = [any(found) if any(one is not None for one in found) else None] * count
    return {**kept, "step": {**kept["step"], "found_inf": found}}


def _with_own_expert_draws(rng: Mapping[str, Any]) -> Mapping[str, Any]:
    """The generator of expert weights as this rank was built with it, where experts are in slots.

    It differs between expert-parallel ranks, is drawn from when a model is built, and by no iteration.
    """
    from megatron.core import tensor_parallel

    name = tensor_parallel.random.get_expert_parallel_rng_tracker_name()
    own = random_states()["tracker"]
    if slots() is None or name not in own:
        return rng
    return {**rng, "tracker": {**rng["tracker"], name: own[name]}}
