"""Registry of all names that this package replaces in Megatron, in torch, or on instances of their classes.

Each replacement has a reason. There are three kinds of replacements:

- for the life of the process (:func:`replace`, :func:`wrap`); :mod:`megatron.moevement.activate` lists most of them;
- on one object (:func:`replace_on`); :data:`DECLARED` lists the names;
- temporary (:func:`replace_for_a_while`); :data:`DECLARED` lists the names.

``tests/unit/megatron/test_activate.py`` pins the signature of every replaced function, and names the function if a new
Megatron changes it. A declared name that no longer exists raises :class:`PatchError`.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from moevement_core.errors import ConfigError
from moevement_core.util.undo import UndoStack

Body = Callable[..., Any]
"""Function that runs in place of another. Its arguments are the other function, and then those of the call."""


class PatchError(ConfigError):
    """Error for a replaced name that is not declared, or a name that the installed version does not have."""


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
    """Module, or ``module:Class`` for a method; the class that defines the method, not a subclass."""
    name: str
    reason: str


_CHAINED = "megatron.core.optimizer.optimizer:ChainedOptimizer"
_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_LAYER_WISE = "megatron.core.optimizer.layer_wise_optimizer:LayerWiseDistributedOptimizer"
_MIXED = "megatron.core.optimizer.optimizer:MixedPrecisionOptimizer"
_RANKS_ALONE = "a replacement builds its model alone, because the other ranks keep theirs"
DECLARED = (
    Declared(
        _CHAINED, "step",
        "must wait for a snapshot's copy, and a failure must leave the update complete or not begun",
    ),
    Declared(_CHAINED, "prepare_grads", "first reduction of a step; its result is recorded, or taken from a record"),
    Declared(
        _CHAINED, "get_grad_norm",
        "last reduction of a step without clipping; its result is recorded, or taken from a record",
    ),
    Declared(
        _CHAINED, "_compute_grad_norms_by_group",
        "last reduction of a step with clipping; its result is recorded, or taken from a record",
    ),
    Declared(_CHAINED, "count_zeros", "a reduction after clipping, where no rank may wait for another"),
    Declared(_CHAINED, "step_with_ready_grads", "a redo repeats the update from logged gradients"),
    *(
        Declared(_DISTRIBUTED, name, "FP8 weights need a reduction over replicas, and an update must not wait for it")
        for name in ("_copy_main_params_to_model_params", "_copy_main_params_to_param_buffer")
    ),
    *(
        Declared(_LAYER_WISE, name, "gathers Muon's matrices within the update, and an update must not wait for it")
        for name in ("start_param_sync_for_bucket_group_subset", "allgather_params")
    ),
    Declared(_CHAINED, "_should_defer_mxfp8_param_sync", "Megatron would gather MXFP8 weights within the update"),
    Declared(
        _MIXED, "_unscale_main_grads_and_check_for_nan",
        "a replay uses the recorded overflow, which may have occurred on another rank",
    ),
    Declared(
        "megatron.core.transformer.moe.router:TopKRouter",
        "routing",
        "counts tokens as they are routed, and admits tokens to extra capacity",
    ),
    Declared("torch.distributed", "all_reduce", _RANKS_ALONE),
    Declared("torch.distributed", "broadcast", _RANKS_ALONE),
    Declared("torch.distributed", "barrier", _RANKS_ALONE),
    Declared("torch.distributed", "get_rank", "Megatron builds data indices only on rank 0, which may be a survivor"),
    Declared("torch.distributed", "all_gather_object", "ranks exchange the keys of parameters only once in a job"),
    Declared("megatron.training.training", "get_megatron_optimizer", "ranks exchange the keys of parameters inside it"),
    Declared(
        "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup", "register_grad_ready",
        "for tests, a failure is injected while a rank counts ready gradients",
    ),
    *(
        Declared(owner, "_copy_model_grads_to_main_grads", "for tests, a failure is injected after this copy")
        for owner in (
            "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer",
            "megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params",
        )
    ),
    Declared(
        "megatron.core.tensor_parallel.random", "_set_cuda_rng_state",
        "for tests, a failure is injected during the exit of a forked random state",
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
    f"{_OPTIMIZER}.layer_wise_optimizer": (
        "use_buffer_param_sync", "start_param_sync_for_bucket_group_subset", "allgather_params",
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
"""Names that this package reads or sets on Megatron's objects, by the module that defines the names.

Some objects lack some names (an optimizer of FP32 weights has no loss scaler). So this package tolerates missing names,
and only :func:`check_names` notices a renamed one.
"""

_replaced: dict[tuple[str, str], Replaced] = {}


def replace(owner: Any, name: str, new: Any, reason: str) -> None:
    """Set ``owner.name = new`` and remember the original; do nothing if the name is replaced already."""
    key = (_path(owner), name)
    if key in _replaced:
        return
    _replaced[key] = Replaced(key[0], name, reason, getattr(owner, name, None))
    setattr(owner, name, new)


def around(original: Callable[..., Any], body: Body) -> Callable[..., Any]:
    """Return a function with the name and signature of ``original`` that runs ``body`` instead."""

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return body(original, *args, **kwargs)

    return replacement


def wrap(owner: Any, name: str, body: Body, reason: str) -> None:
    """Run ``body`` in place of the function of this name, which must exist; see :func:`replace`."""
    if (_path(owner), name) not in _replaced:
        replace(owner, name, around(getattr(owner, name), body), reason)


def replace_on(instance: Any, name: str, body: Body) -> None:
    """Run ``body`` in place of a method of an object, or a function of a module, for the life of the object.

    Raises:
        PatchError: the name is not declared, or the object does not have it.
    """
    _check(instance, name, DECLARED)
    vars(instance)[name] = around(getattr(instance, name), body)


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
                "renamed it; use megatron-core 0.19.x, or a revision that is tested (docs/megatron_versions.md)"
            )


def _check(owner: Any, name: str, among: Sequence[Declared]) -> None:
    if all(declared.name != name for declared in among):
        raise PatchError(
            f"{name} of {_describe(owner)} is replaced but not declared; declare it in megatron/moevement/patches.py"
        )
    if not hasattr(owner, name):
        raise PatchError(
            f"{_describe(owner)} has no {name}, which megatron/moevement/patches.py declares; this version of Megatron "
            "or torch has renamed it"
        )


def replaced() -> list[Replaced]:
    """Return all names that are replaced for the life of the process, in the order of replacement."""
    return list(_replaced.values())


def _describe(owner: Any) -> str:
    return str(getattr(owner, "__name__", None) or type(owner).__qualname__)


def _path(owner: Any) -> str:
    if isinstance(owner, type):
        return f"{owner.__module__}.{owner.__qualname__}"
    return str(owner.__name__)
