"""Replacement of Transformer Engine's FP8 by this package in Megatron, if Transformer Engine is not installed."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any
from unittest import mock

from megatron.moevement.fp8 import adam, autocast, linear, shards, tensor
from megatron.moevement.fp8.recipe import Recipe
from megatron.moevement.patches import replace, wrap

_CHECKED = {"1.7.0.dev0", "1.11.0", "2.6.0dev0", "2.1.0", "2.1.0.dev0"}
"""Versions of Transformer Engine that Megatron's configuration requires for FP8 or for narrow optimizer state."""
_TE = "transformer_engine"
_NO_TE = "is Transformer Engine's"


def install() -> None:
    """Replace the names by which Megatron uses Transformer Engine's FP8; idempotent.

    The function imports Megatron's models.
    """
    from megatron.core import fp8_utils, recompute
    from megatron.core.extensions import transformer_engine as extensions
    from megatron.core.tensor_parallel import layers, random
    from megatron.core.transformer import transformer_config
    from megatron.core.transformer.moe import moe_layer

    if fp8_utils.HAVE_TE:
        return
    for module in (
        "fp8_utils", "recompute", "transformer.transformer_block", "transformer.multi_token_prediction",
        "pipeline_parallel.combined_1f1b",
    ):  # fmt: skip
        replace(import_module(f"megatron.core.{module}"), "get_fp8_context", get_fp8_context, _NO_TE)
    wrap(transformer_config, "is_te_min_version", _as_if_new_enough, "asks for Transformer Engine before FP8")
    for kind in (layers.ColumnParallelLinear, layers.RowParallelLinear):
        wrap(kind, "_forward_impl", linear.forward_in_fp8, "has no product in FP8")
        wrap(kind, "__init__", linear.remember_layer, "does not say which layers were built to run in FP8")
    for owner in (recompute, moe_layer, extensions):
        replace(owner, "te_checkpoint", autocast.checkpoint, _NO_TE)
    replace(fp8_utils, "HAVE_TE_FP8_TENSOR_CLASS", True, _NO_TE)
    replace(fp8_utils, "FP8_TENSOR_CLASS", tensor.QuantisedTensor, _NO_TE)
    replace(fp8_utils, "HAVE_TE_MXFP8TENSOR", True, _NO_TE)
    replace(fp8_utils, "MXFP8Tensor", tensor.MXQuantisedTensor, _NO_TE)
    replace(fp8_utils, "_modify_underlying_storage_impl", shards.modify_underlying_storage, _NO_TE)
    replace(fp8_utils, "_quantize_param_shard_impl", shards.quantize_param_shard, _NO_TE)
    replace(fp8_utils, "te_post_all_gather_processing", shards.post_all_gather_processing, _NO_TE)
    _install_adam()
    replace(random, "FP8GlobalStateManager", _Manager, _NO_TE)
    replace(random, "activation_recompute_forward", _recompute_phase, _NO_TE)
    replace(random, "fp8_autocast", _again, _NO_TE)


def get_fp8_context(config: Any, layer_no: int = -1, is_init: bool = False) -> AbstractContextManager[None]:
    """Return the context in which Megatron builds a layer (``is_init``) or runs it, in place of Megatron's function."""
    from megatron.core import fp8_utils, parallel_state

    if not config.fp8 or fp8_utils.is_first_last_bf16_layer(config, layer_no):
        return nullcontext()
    recipe = Recipe.of(config)
    if is_init:
        return linear.building(recipe, keeps_weights=config.fp8_param)
    group = None
    if parallel_state.model_parallel_is_initialized():
        group = parallel_state.get_amax_reduction_group(
            with_context_parallel=True, tp_only_amax_red=config.tp_only_amax_red
        )
    return autocast.autocast(recipe, group)


def _as_if_new_enough(original: Callable[..., bool], version: str, check_equality: bool = True) -> bool:
    return version in _CHECKED or original(version, check_equality)


def _install_adam() -> None:
    """Make ``--use-precision-aware-optimizer`` use this project's Adam."""
    from megatron.core import optimizer
    from megatron.core.optimizer import optimizer_config

    wrap(optimizer_config, "is_te_min_version", _as_if_new_enough, "asks for Transformer Engine's optimizer")
    wrap(optimizer, "is_te_min_version", _as_if_new_enough, "asks for Transformer Engine's optimizer")
    wrap(optimizer_config.OptimizerConfig, "__post_init__", _with_our_adam, "imports Transformer Engine's optimizer")
    wrap(
        optimizer,
        "_get_megatron_optimizer_based_on_param_groups",
        _on_our_adam,
        "makes torch's Adam, which knows no narrow state",
    )


def _with_our_adam(original: Callable[[Any], None], self: Any) -> None:
    """Accept this project's Adam, in place of ``__post_init__`` of Megatron's ``OptimizerConfig``.

    Megatron's checks import Transformer Engine's optimizer.
    """
    from megatron.core.utils import get_te_version

    if not self.use_precision_aware_optimizer:
        original(self)
        return
    get_te_version()  # The call caches its result, so it must come before the stand-in modules below exist.
    names = [_TE, f"{_TE}.pytorch", f"{_TE}.pytorch.optimizers"]
    modules = {name: types.ModuleType(name) for name in names}
    modules[names[-1]].FusedAdam = adam.PrecisionAwareAdam  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, modules):
        original(self)


def _on_our_adam(original: Callable[..., Any], config: Any, *args: Any, **kwargs: Any) -> Any:
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    if not config.use_precision_aware_optimizer:
        return original(config, *args, **kwargs)
    for name in ("HAVE_APEX_OR_TE", "USING_TE_OPTIMIZER"):  # These names decide where it counts steps.
        replace(distrib_optimizer, name, True, "counts steps as torch's Adam does")
    with mock.patch.multiple(optimizer, USING_PYTORCH_OPTIMIZER=False, Adam=adam.PrecisionAwareAdam):
        return original(config, *args, **kwargs)


class _Manager:
    """Replacement for Transformer Engine's FP8 state manager, which Megatron queries when it recomputes activations."""

    @staticmethod
    def reset() -> None:
        autocast.forget()
        linear.forget()

    @staticmethod
    def is_fp8_enabled() -> bool:
        return autocast.current() is not None

    @staticmethod
    def get_fp8_recipe() -> Recipe | None:
        region = autocast.current()
        return region.recipe if region is not None else None


def _recompute_phase(activation_recompute: bool, recompute_phase: bool) -> AbstractContextManager[None]:
    return nullcontext()


def _again(enabled: bool, fp8_recipe: Recipe | None) -> AbstractContextManager[None]:
    """Return a context for recomputation under a recipe whose scales need no history.

    ``preflight/machine.py`` refuses jobs that would need this context with delayed scaling.
    """
    return autocast.autocast(fp8_recipe, None) if enabled and fp8_recipe is not None else nullcontext()
