"""Registry of all names that this package replaces in Megatron, in torch, or on instances of their classes.

Each replacement has a reason. It lasts for the life of the process (:func:`replace`, :func:`wrap`; most of these are
listed in :mod:`megatron.moevement.activate`), affects one object (:func:`replace_on`), or is temporary
(:func:`replace_for_a_while`). The last two kinds are declared in :data:`DECLARED`. ``tests/unit/test_activate.py`` pins
the signature of every replaced function, so it names the one that a new Megatron changes. A missing name fails at once.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from moevement_core.errors import ConfigError
from moevement_core.util.undo import UndoStack


class PatchError(ConfigError):
    """Error for a name that is to be replaced and is not declared, or does not exist in the installed version."""


@dataclass(frozen=True)
class Replaced:
    """Attribute of another package that this process has replaced."""

    owner: str
    name: str
    reason: str
    original: Any


@dataclass(frozen=True)
class Declared:
    """Declaration of a name that is replaced on an object, or temporarily."""

    owner: str
    """Owner as ``module`` or ``module:Class``; the class is the one that defines the method."""
    name: str
    reason: str


_CHAINED = "megatron.core.optimizer.optimizer:ChainedOptimizer"
_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_MIXED = "megatron.core.optimizer.optimizer:MixedPrecisionOptimizer"
_RANKS_ALONE = "a rank that is new in a running job builds itself alone: others do not build theirs"
DECLARED = (
    Declared(_CHAINED, "step", "the copy of a snapshot must be over, and a failure leave the step whole or undone"),
    Declared(_CHAINED, "prepare_grads", "the first reduction of a step; recorded, replayed, or followed"),
    Declared(_CHAINED, "get_grad_norm", "the last reduction of a step; recorded, replayed, or followed"),
    Declared(_CHAINED, "_compute_grad_norms_by_group", "likewise, where gradients are clipped by group"),
    Declared(_CHAINED, "count_zeros", "a reduction that Megatron makes between clipping and the update"),
    Declared(_CHAINED, "step_with_ready_grads", "an update that is made again is made from logged gradients"),
    *(
        Declared(_DISTRIBUTED, name, "weights in FP8 need all replicas, for whom an update does not wait")
        for name in ("_copy_main_params_to_model_params", "_copy_main_params_to_param_buffer")
    ),
    Declared(_CHAINED, "_should_defer_mxfp8_param_sync", "gathers MXFP8 weights within the update"),
    Declared(
        _MIXED, "_unscale_main_grads_and_check_for_nan", "in a replay the recorded verdict counts, seen elsewhere maybe"
    ),
    Declared(
        "megatron.core.transformer.moe.router:TopKRouter",
        "routing",
        "tokens are counted, and let in, where they are routed",
    ),
    Declared("torch.distributed", "all_reduce", _RANKS_ALONE),
    Declared("torch.distributed", "broadcast", _RANKS_ALONE),
    Declared("torch.distributed", "barrier", _RANKS_ALONE),
    Declared("torch.distributed", "get_rank", "indices of data are built on rank 0, which keeps its own"),
    Declared("torch.distributed", "all_gather_object", "ranks tell each other the keys of parameters once"),
    Declared("megatron.training.training", "get_megatron_optimizer", "that is when they do"),
    Declared(
        "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup", "register_grad_ready",
        "a drill interrupts a rank that counts its gradients",
    ),
    *(
        Declared(owner, "_copy_model_grads_to_main_grads", "a drill interrupts a rank with its copy of gradients")
        for owner in (
            "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer",
            "megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params",
        )
    ),
    Declared(
        "megatron.core.tensor_parallel.random", "_set_cuda_rng_state",
        "a drill interrupts a rank on its way out of another random state",
    ),
)  # fmt: skip

_OPTIMIZER, _DDP = "megatron.core.optimizer", "megatron.core.distributed"
LOOKED_UP = {
    f"{_OPTIMIZER}.optimizer": (
        "chained_optimizers", "float16_groups", "fp32_from_float16_groups", "fp32_from_fp32_groups", "found_inf",
        "grad_scaler", "init_state_fn", "_copy_main_params_to_model_params", "_has_grad_norm_group_cache",
    ),
    f"{_OPTIMIZER}.distrib_optimizer": (
        "model_param_gbuf_map", "_get_model_param_range_map", "_get_main_param_and_optimizer_states",
        "start_param_sync_for_bucket_group_subset", "_defer_param_sync", "_copy_main_params_to_model_params",
    ),
    f"{_OPTIMIZER}.grad_scaler": ("_growth_tracker", "_hysteresis_tracker", "_scale"),
    f"{_DDP}.distributed_data_parallel": (
        "remove_forward_pre_hook_handles", "expert_parallel_bucket_groups", "force_all_reduce", "use_forward_hook",
    ),
    f"{_DDP}.param_and_grad_buffer": (
        "grad_reduce_handle", "grad_reduce_finished", "is_last_microbatch", "is_first_batch", "param_gather_handle",
        "golden_per_param_grad_ready_counts", "per_param_grad_ready_counts", "param_gather_dispatched",
        "layerwise_gather_list",
    ),
    "megatron.core.transformer.moe.shared_experts": ("_overlap_state", "cached_fc1_input", "gate_score"),
    "megatron.core.tensor_parallel.random": ("_current_state_name", "_unset_checkpointing"),
    "megatron.core.transformer.module": ("modules_with_is_first_microbatch",),
}  # fmt: skip
"""Names that this package reads or sets on Megatron's objects if they have them, by the module that defines them. Not
all objects have them (an optimizer of FP32 weights has no loss scaler), so a renamed one would go unnoticed.
"""

_replaced: dict[tuple[str, str], Replaced] = {}


def replace(owner: Any, name: str, new: Any, reason: str) -> None:
    """Set ``owner.name = new`` and remember the original; do nothing if the name is replaced already."""
    key = (_path(owner), name)
    if key in _replaced:
        return
    _replaced[key] = Replaced(key[0], name, reason, getattr(owner, name, None))
    setattr(owner, name, new)


def wrap(owner: Any, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]], reason: str) -> None:
    """Replace a name by a wrapper of its original value, which must exist; see :func:`replace`."""
    if (_path(owner), name) not in _replaced:
        replace(owner, name, wrapper(getattr(owner, name)), reason)


def replace_on(instance: Any, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a method of one object, or a name of a module, by the result of ``wrapper``, for the life of its owner.

    Raises:
        PatchError: the name is not declared, or the object does not have it.
    """
    _check(instance, name, DECLARED)
    vars(instance)[name] = wrapper(getattr(instance, name))


def replace_for_a_while(undo: UndoStack, module: Any, name: str, new: Any) -> None:
    """Replace a name of a module until ``undo`` is closed.

    Raises:
        PatchError: the name is not declared, or the module does not have it.
    """
    _check(module, name, [declared for declared in DECLARED if declared.owner == module.__name__])
    undo.set(module, name, new)


def check_names() -> None:
    """Check that every name of :data:`LOOKED_UP` occurs in the source of its module.

    Raises:
        PatchError: a name is missing, because Megatron has renamed it.
    """
    for path, names in LOOKED_UP.items():
        words = set(re.findall(r"\w+", inspect.getsource(import_module(path))))
        if missing := [name for name in names if name not in words]:
            raise PatchError(
                f"{path} has no {', '.join(missing)}, which megatron/moevement looks up; this version of Megatron has "
                "renamed it. Use megatron-core 0.19.x"
            )


def _check(owner: Any, name: str, among: Sequence[Declared]) -> None:
    if all(declared.name != name for declared in among):
        raise PatchError(f"{name} of {_describe(owner)} is replaced and not declared in megatron/moevement/patches.py")
    if not hasattr(owner, name):
        raise PatchError(
            f"{_describe(owner)} has no {name}, which megatron/moevement/patches.py declares; this version of Megatron "
            "or torch has renamed it"
        )


def replaced() -> list[Replaced]:
    """Return all names replaced for the life of the process so far, in order."""
    return list(_replaced.values())


def _describe(owner: Any) -> str:
    return str(getattr(owner, "__name__", None) or type(owner).__qualname__)


def _path(owner: Any) -> str:
    if isinstance(owner, type):
        return f"{owner.__module__}.{owner.__qualname__}"
    return str(owner.__name__)
