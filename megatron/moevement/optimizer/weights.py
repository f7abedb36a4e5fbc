"""Computation of compute weights from master weights, and their gather, at the end of an update or a restore.

The scales of FP8 weights (``--fp8-param-gather``) depend on the largest master weights of all replicas. So FP8 weights
are computed at the gather of parameters, which may be interrupted and repeated. The update does not compute them,
because it waits for no other rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from megatron.moevement.fp8.delayed import remaking
from megatron.moevement.fp8.shards import post_all_gather_processing
from megatron.moevement.state_digest import members

HALF = "moevement_half"
"""Attribute of MXFP8 parameters: this rank's range in BF16, rounded from master weights (``optimizer/views.py``)."""


def is_quantised(member: Any) -> bool:
    """Return True if an optimizer's compute weights are in FP8 and their scales are reduced over replicas."""
    config = getattr(member, "ddp_config", None)
    return bool(getattr(config, "fp8_param_gather", False)) and not getattr(config, "use_megatron_fsdp", False)


def gathers_by_gradients(member: Any) -> bool:
    """Return True if an optimizer gathers compute weights through gradient buffers, which loses the gradients."""
    return bool(getattr(getattr(member, "config", None), "reuse_grad_buf_for_mxfp8_param_ag", False))


@torch.no_grad()
def copy_masters(member: Any) -> None:
    """Copy master weights over this rank's range of the compute weights, as Megatron does after a step.

    Collective over the replicas if :func:`is_quantised`.
    """
    if getattr(member, "is_stub_optimizer", False):
        return
    if getattr(member.config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", False):
        _write_weights(member.optimizer)
        if is_quantised(member):  # Weights without elements on this rank also have new scales.
            post_all_gather_processing([weight for buffer in member.buffers for weight in buffer.params])
    elif gathers_by_gradients(member):
        member._copy_main_params_to_param_buffer()
    elif hasattr(member, "_copy_main_params_to_model_params"):
        member._copy_main_params_to_model_params()


def _write_weights(inner: Any) -> None:
    """Write weights from master weights that the optimizer keeps.

    A weight that is the upper half of its master needs no write.
    """
    for group in inner.param_groups:
        for weight in group["params"]:
            master = inner.state[weight].get("master_param")
            if master is not None and master.dtype != torch.int16:
                weight.detach().copy_(inner.get_unscaled_state(weight, "master_param"))


@torch.no_grad()
def round_masters(member: Any) -> None:
    """Round masters to the BF16 values from which MXFP8 weights are computed.

    Snapshots save these values, because neither form of an MXFP8 weight (by rows, by columns) determines the other.
    """
    for parameter in getattr(member, "model_param_gbuf_map", ()):
        if (half := getattr(parameter, HALF, None)) is not None:
            half.copy_(parameter.main_param.view(-1))


def recompute_weights(chunks: Iterable[Any], optimizer: Any) -> None:
    """Recompute weights from their master weights on all replicas, before training, if the two may differ.

    They differ in two cases. Megatron dequantises FP8 weights for a dense checkpoint and quantises them again; for
    MXFP8 the second quantisation gives other codes. And an optimizer with narrow masters starts with weights that are
    more precise than the masters, while a recovery has only the masters.
    """
    recompute_own_weights(optimizer)
    with remaking():
        _make_quantised_again(chunks, optimizer)


def _make_quantised_again(chunks: Iterable[Any], optimizer: Any) -> None:
    quantised = [member for member in members(optimizer) if is_quantised(member)]
    for member in quantised:
        copy_masters(member)
        round_masters(member)
    if quantised or any(map(_keeps_narrow_masters, members(optimizer))):
        gather(chunks, force=True)


@torch.no_grad()
def recompute_own_weights(optimizer: Any) -> None:
    """Recompute the weights of this rank's range if masters are narrow, without waiting for other ranks.

    A replacement then has the state with which the job started. FP8 weights with FP32 masters are already correct on a
    newly built model. The next gather fills the ranges of other ranks.
    """
    for member in filter(_keeps_narrow_masters, members(optimizer)):
        if member.optimizer is not None and not member.optimizer.state:
            member.init_state_fn(member.optimizer, member.config)
        with remaking():
            copy_masters(member)


def _keeps_narrow_masters(member: Any) -> bool:
    config = getattr(member, "config", None)
    keeps = getattr(config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", False)
    return bool(keeps) and getattr(config, "main_params_dtype", torch.float32) != torch.float32


def gather(chunks: Iterable[Any], *, force: bool = False) -> None:
    """Send every replica's range of the compute weights to all replicas.

    Each virtual stage is gathered once, although dense weights and experts have separate optimizers. MXFP8 weights are
    gathered through gradient buffers, which are cleared afterwards.

    Args:
        chunks: virtual stages in their data-parallel wrappers; duplicates are allowed.
        force: True to gather even if the next forward pass would (``--overlap-param-gather``).
    """
    for chunk in dict.fromkeys(chunks):
        if not chunk.ddp_config.use_distributed_optimizer:
            continue
        if force or not chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)
