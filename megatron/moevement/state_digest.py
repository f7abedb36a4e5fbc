"""Training state of this rank in parts, and the digests of these parts.

The parts are those that a recovery has to restore: compute weights, master weights, optimizer state, router buffers,
loss scalers, scheduler, random states, consumed samples.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from megatron.moevement.optimizer.quantised import quantised_buffers
from megatron.moevement.optimizer.scales import fp8_scales
from megatron.moevement.optimizer.torch_adam import make_adam_state
from megatron.moevement.runtime.live import Live
from moevement_core.comms.exchange import all_gather_objects
from moevement_core.util.digest import digest

PARTS = (
    "weights", "master_weights", "optimizer_state", "router_buffers", "other_buffers", "loss_scalers", "scheduler",
    "rng", "progress",
)  # fmt: skip


def rank_digests(live: Live) -> dict[str, str]:
    """Return the digest of each part of this rank's state.

    The function does not communicate. It reads the random generators without advancing them.
    """
    parts: dict[str, Callable[[], Any]] = {
        "weights": lambda: named_tensors(live, "named_parameters", lambda name: True),
        "master_weights": lambda: [_master_weights(member) for member in members(live.optimizer)],
        "optimizer_state": lambda: [_optimizer_state(member) for member in members(live.optimizer)],
        "router_buffers": lambda: named_tensors(live, "named_buffers", _is_router),
        "other_buffers": lambda: _other_buffers(live),
        "loss_scalers": lambda: [loss_scaler(member) for member in members(live.optimizer)],
        "scheduler": lambda: live.scheduler.state_dict() if live.scheduler is not None else None,
        "rng": random_states,
        "progress": lambda: progress(live),
    }
    assert tuple(parts) == PARTS
    return {part: digest(state()) for part, state in parts.items()}


def job_digest(live: Live) -> dict[str, Any]:
    """Return digests of the whole job: of all state, of each part, and of each part on each rank.

    Collective; all ranks get the same result.
    """
    ranks = all_gather_objects(rank_digests(live), dict[str, str])
    parts = {part: digest([rank[part] for rank in ranks]) for part in PARTS}
    return {"all": digest(parts), "parts": parts, "ranks": ranks}


def members(optimizer: Any) -> list[Any]:
    """Return the optimizers in a chained optimizer: that of dense weights and that of experts.

    A chain may have chains as members: with the distributed optimizer, Megatron chains Muon's optimizers, and chains
    the result with that of Adam. The result has one optimizer if ``optimizer`` is not chained, and is empty if
    ``optimizer`` is None.
    """
    if optimizer is None:
        return []
    if not hasattr(optimizer, "chained_optimizers"):
        return [optimizer]
    return [member for link in optimizer.chained_optimizers for member in members(link)]


def layer_wise(optimizer: Any) -> list[Any]:
    """Return the chains in which each data-parallel rank updates whole matrices (``LayerWiseDistributedOptimizer``).

    Megatron builds one for Muon with the distributed optimizer; other jobs have none.
    """
    links = [optimizer, *getattr(optimizer, "chained_optimizers", ())]
    return [link for link in links if hasattr(link, "use_buffer_param_sync")]


def _is_router(name: str) -> bool:
    return ".router." in name


def named_tensors(live: Live, kind: str, wanted: Callable[[str], bool]) -> list[dict[str, Any]]:
    """Return parameters or buffers of each virtual stage by name, as they are stored: quantised ones as raw bytes.

    Args:
        live: Megatron's objects on this rank.
        kind: method of a module that yields the tensors, ``named_parameters`` or ``named_buffers``.
        wanted: function that selects tensors by name.
    """
    return [
        {name: _raw(tensor) for name, tensor in getattr(chunk, kind)() if wanted(name)} for chunk in live.model or []
    ]


def _other_buffers(live: Live) -> list[dict[str, Any]]:
    """Return the buffers of each virtual stage by name, without those of routers, but with the FP8 scales.

    The function adds the scales because Transformer Engine's layers do not register them as buffers.
    """
    buffers = named_tensors(live, "named_buffers", lambda name: not _is_router(name))
    return [{**named, **scales} for named, scales in zip(buffers, fp8_scales(live.model or []), strict=True)]


def _raw(tensor: torch.Tensor) -> Any:
    quantised = quantised_buffers(tensor)
    return tensor.data if quantised is None else quantised.all


def _groups(member: Any) -> list[dict[str, Any]]:
    inner = getattr(member, "optimizer", None)
    return [] if inner is None else list(inner.param_groups)


def _master_weights(member: Any) -> list[list[Any]]:
    """Return the tensors that the optimizer updates: FP32 copies of weights (or shards of them), or FP32 weights."""
    return [[_raw(param) for param in group["params"]] for group in _groups(member)]


def _optimizer_state(member: Any) -> list[Any]:
    # Before its first step, torch's Adam may have no state, which is equal to its initial state.
    make_adam_state(getattr(member, "optimizer", None))
    state = getattr(getattr(member, "optimizer", None), "state", {})
    scales = getattr(getattr(member, "optimizer", None), "_scales", {})
    return [
        {
            "options": {name: value for name, value in group.items() if name != "params" and _is_plain(value)},
            "state": [dict(state.get(param, {})) for param in group["params"]],
            **({"scales": [dict(scales.get(param, {})) for param in group["params"]]} if scales else {}),
        }
        for group in _groups(member)
    ]


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str | torch.Tensor)


def loss_scaler(member: Any) -> Any:
    """Return the state of the loss scaler of one member of a chained optimizer; None if it has no loss scaler."""
    scaler = getattr(member, "grad_scaler", None)
    return scaler.state_dict() if scaler is not None else None


def random_states() -> dict[str, Any]:
    """Return the state of every random generator: those of Python, NumPy, host, device, and Megatron's tracker."""
    from megatron.core import tensor_parallel

    kind, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [kind, keys, position, has_gauss, gauss],
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": dict(_tracker_states(tensor_parallel.get_cuda_rng_tracker().get_states())),
    }


def _tracker_states(states: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, state in states.items():
        yield name, state.get_state() if isinstance(state, torch.Generator) else state


def progress(live: Live) -> dict[str, int]:
    """Return the progress of the job: iteration and consumed samples."""
    args = live.args
    return {
        "iteration": live.iteration,
        "consumed_train_samples": args.consumed_train_samples,
        "consumed_valid_samples": args.consumed_valid_samples,
        "skipped_train_samples": args.skipped_train_samples,
    }
