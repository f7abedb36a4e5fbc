"""Conversion of another rank's boundary state for this rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.moevement.elastic.slots import slots
from megatron.moevement.optimizer.outcome import step_counts
from megatron.moevement.state_digest import members, random_states


def fitted(boundary: Mapping[str, Any], optimizer: Any) -> dict[str, Any]:
    """Return the boundary state of a rank of the same stage in a form that this rank can restore.

    With one data-parallel rank, Megatron has a single optimizer; with more, it has another one for experts. If the
    number of optimizers has changed, the function uses the first loss scaler for all of them.
    """
    scalers = list(boundary["loss_scalers"])
    count = len(members(optimizer))
    if len(scalers) != count:
        scalers = [scalers[0]] * count
    steps = {step for of_member in boundary["group_steps"] for step in of_member if step is not None}
    step = max(steps, default=None)  # A step counts for all parameters together, so all groups have the same count.
    return {
        **boundary,
        "rng": _with_own_expert_draws(boundary["rng"]),
        "loss_scalers": scalers,
        "group_steps": [[step] * len(of_member) for of_member in step_counts(optimizer)],
    }


def fitted_record(record: Mapping[str, Any], optimizer: Any, *, is_comparable: bool) -> dict[str, Any]:
    """Return the outcome of an iteration in a form that this rank can use.

    Args:
        record: outcome on a rank of the same stage.
        optimizer: Megatron's optimizer.
        is_comparable: True if a recovery computes the same bits again; if False, the losses are left out.
    """
    if not record:
        return {}
    kept = {name: value for name, value in record.items() if is_comparable or name != "losses"}
    kept.pop("sent", None)  # other ranks receive it now, in other pieces
    if "step" not in kept:
        return kept
    found_inf, count = list(kept["step"]["found_inf"]), len(members(optimizer))
    if len(found_inf) != count:
        found_inf = [any(found_inf) if any(flag is not None for flag in found_inf) else None] * count
    return {**kept, "step": {**kept["step"], "found_inf": found_inf}}


def _with_own_expert_draws(rng: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return random states with this rank's own generator of expert weights, if experts are in slots.

    This generator differs between expert-parallel ranks. Megatron draws from it when it builds a model, but in no
    iteration.
    """
    from megatron.core import tensor_parallel

    name = tensor_parallel.random.get_expert_parallel_rng_tracker_name()
    own = random_states()["tracker"]
    if slots() is None or name not in own:
        return rng
    return {**rng, "tracker": {**rng["tracker"], name: own[name]}}
