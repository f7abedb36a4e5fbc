"""Choice of the kernels that run the experts (``--moevement-frozen-kernels``), with checks that the kernels fit."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import torch
from moevement_kernels.activations import Activation
from moevement_kernels.backend import Backend, why_reference

from moevement_core.errors import ConfigError


class FrozenKernels(StrEnum):
    """Values of ``--moevement-frozen-kernels``."""

    AUTO = "auto"
    TRITON = "triton"
    CUDA = "cuda"
    WGRAD = "wgrad"
    OFF = "off"


INSTEAD = "give --moevement-frozen-kernels off"


def backend_of(args: argparse.Namespace, config: Any) -> Backend | None:
    """Return the kernels that run whole experts of a model; None if Megatron's own layers run them.

    Args:
        args: Megatron's arguments.
        config: Megatron's ``TransformerConfig``.

    Raises:
        ConfigError: the flag asks for kernels that cannot run these experts.
    """
    choice = FrozenKernels(args.moevement_frozen_kernels)
    if choice in (FrozenKernels.OFF, FrozenKernels.WGRAD):
        return None
    reasons = list(_refusals(args, config))
    if choice is FrozenKernels.AUTO:
        return None if reasons or why_reference() is not None else Backend.TRITON
    if reasons:
        raise ConfigError(f"--moevement-frozen-kernels {choice}: {'; '.join(reasons)}; {INSTEAD}")
    if choice is FrozenKernels.CUDA and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9:
        raise ConfigError(
            f"--moevement-frozen-kernels cuda: the GPU has compute capability {torch.cuda.get_device_capability()}, "
            "but the kernel needs 9.0; give triton instead"
        )
    return Backend(str(choice))


def splits_weight_gradients(args: argparse.Namespace, config: Any) -> bool:
    """Return True under ``--moevement-frozen-kernels wgrad``.

    Grouped linear layers then run Transformer Engine's kernels, but this project's kernel computes weight gradients.

    Args:
        args: Megatron's arguments.
        config: Megatron's ``TransformerConfig``.

    Raises:
        ConfigError: the flag has this value, but the kernel cannot compute the weight gradients of these layers.
    """
    if FrozenKernels(args.moevement_frozen_kernels) is not FrozenKernels.WGRAD:
        return False
    if reasons := list(_linear_refusals(args, config)):
        raise ConfigError(f"--moevement-frozen-kernels {FrozenKernels.WGRAD}: {'; '.join(reasons)}; {INSTEAD}")
    return True


def activation_of(config: Any) -> Activation | None:
    """Return the activation of the experts; None if the kernels do not support it."""
    from megatron.core.activations import squared_relu
    from torch.nn import functional

    gated = {functional.silu: Activation.SWIGLU, functional.gelu: Activation.GEGLU}
    plain = {
        functional.gelu: Activation.GELU,
        functional.relu: Activation.RELU,
        squared_relu: Activation.SQUARED_RELU,
    }
    return (gated if config.gated_linear_unit else plain).get(config.activation_func)


def _refusals(args: argparse.Namespace, config: Any) -> Iterator[str]:
    """Yield the reasons why this project's kernels cannot run whole experts."""
    if activation_of(config) is None:
        name = getattr(config.activation_func, "__name__", str(config.activation_func))
        yield f"{'gated ' if config.gated_linear_unit else ''}{name} is none of {', '.join(Activation)}"
    for name, flag in (
        ("moe_apply_probs_on_input", "--moe-apply-probs-on-input"),
        ("activation_func_clamp_value", "a clamped activation"),
        ("moe_mlp_glu_interleave_size", "interleaved gates"),
    ):
        if getattr(config, name, None):
            yield f"{flag} works only with Megatron's own layers"
    if getattr(config, "glu_linear_offset", 0.0):
        yield "an offset of the linear half works only with Megatron's own layers"
    yield from _linear_refusals(args, config)


def _linear_refusals(args: argparse.Namespace, config: Any) -> Iterator[str]:
    """Yield the reasons why this project's kernels cannot compute the weight gradients of the experts' layers."""
    if config.add_bias_linear:
        yield "experts have biases, and the kernels need --disable-bias-linear"
    for name, flag in (
        ("fp8", "--fp8-format"),
        ("fp4", "--fp4-format"),
        ("use_transformer_engine_op_fuser", "--use-transformer-engine-op-fuser"),
        ("fine_grained_activation_offloading", "--fine-grained-activation-offloading"),
        ("delay_wgrad_compute", "--delay-wgrad-compute"),
        ("overlap_dispatch_backward_with_experts_wgrad", "--overlap-dispatch-backward-with-experts-wgrad"),
        ("moe_single_grouped_weight", "--moe-single-grouped-weight"),
    ):
        if getattr(config, name, None):
            yield f"{flag} works only with Megatron's own layers"
    if getattr(args, "use_megatron_fsdp", False) or getattr(args, "use_torch_fsdp2", False):
        yield "FSDP stores weights and gradients where the kernels cannot use them"
    if (getattr(config, "gtp_weight_remat_size", None) or 1) > 1:
        yield "generalised tensor parallelism shards each weight, and the kernels need whole weights"
    if config.hidden_size % 8 or config.moe_ffn_hidden_size % 8:
        yield (
            f"--hidden-size {config.hidden_size} --moe-ffn-hidden-size {config.moe_ffn_hidden_size} must both be "
            "multiples of 8, so that weights begin at multiples of 16 bytes"
        )
