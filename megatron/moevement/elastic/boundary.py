"""Conversion of records that other ranks made before an elastic job changed its ranks, so that this rank can use them.

There are two kinds: boundary records, and records of an iteration's step (its losses and outcome).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.moevement.elastic.slots import slots
from megatron.moevement.optimizer.outcome import step_counts
from megatron.moevement.state_digest import members, random_states


def fitted(boundary: Mapping[str, Any], optimizer: Any) -> dict[str, Any]:
    """Convert the boundary record of another rank of this stage to a record that this rank can restore.

    A rank has one Megatron optimizer if the job has one data-parallel rank; otherwise it has a second one for experts.
    If the record is from a rank with another number of optimizers, all optimizers of this rank get the record's first
    loss scaler.
    """
    scalers = list(boundary["loss_scalers"])
    count = len(members(optimizer))
    if len(scalers) != count:
        scalers = [scalers[0]] * count
    steps = {step for of_member in boundary["group_steps"] for step in of_member if step is not None}
    step = max(steps, default=None)  # Each optimizer step updates all groups, so all groups have the same count.
    return {
        **boundary,
        "rng": _with_own_expert_draws(boundary["rng"]),
        "loss_scalers": scalers,
        "group_steps": [[step] * len(of_member) for of_member in step_counts(optimizer)],
    }


def fitted_record(record: Mapping[str, Any], optimizer: Any, *, is_comparable: bool) -> dict[str, Any]:
    """Convert the record that another rank of this stage made of an iteration's step, so that this rank can use it.

    Args:
        record: record of the other rank; empty if the other rank made none.
        optimizer: Megatron's optimizer.
        is_comparable: True to keep the recorded losses; False if the recovery may not restore the lost state bit for
            bit, so that these losses would not belong to the restored state.
    """
    if not record:
        return {}
    kept = {name: value for name, value in record.items() if is_comparable or name != "losses"}
    kept.pop("sent", None)  # Ranks of the resized job send other tensors, so this digest does not apply.
    if "step" not in kept:
        return kept
    found_inf, count = list(kept["step"]["found_inf"]), len(members(optimizer))
    if len(found_inf) != count:
        found_inf = [any(found_inf) if any(flag is not None for flag in found_inf) else None] * count
    return {**kept, "step": {**kept["step"], "found_inf": found_inf}}


def _with_own_expert_draws(rng: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``rng``; with expert slots, return it with this rank's present state of the generator for expert weights.

    The random states in ``rng`` are from another rank. Expert-parallel ranks have different states of this generator,
    so the other rank's state does not apply here. Megatron draws from the generator only when it builds a model.
    """
    from megatron.core import tensor_parallel

    name = tensor_parallel.random.get_expert_parallel_rng_tracker_name()
    own = random_states()["tracker"]
    if slots() is None or name not in own:
        return rng
    return {**rng, "tracker": {**rng["tracker"], name: own[name]}}
