"""Computation of compute weights from master weights, and their gather, at the end of an update or a restore.

The scales of FP8 weights (``--fp8-param-gather``) depend on the largest master weights of all replicas, so a rank waits
for other ranks when it computes FP8 weights. The update section of a step must not wait for other ranks. Therefore
ranks compute FP8 weights later, when they gather parameters. A restart may interrupt this, and ranks can repeat it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from megatron.moevement.fp8.delayed import remaking
from megatron.moevement.fp8.shards import post_all_gather_processing
from megatron.moevement.state_digest import layer_wise, members

HALF = "moevement_half"
"""Attribute of MXFP8 parameters: this rank's range in BF16, rounded from master weights (``optimizer/views.py``)."""


def is_quantised(member: Any) -> bool:
    """Return True if an optimizer's compute weights are in FP8, so that their scales are reduced over replicas."""
    config = getattr(member, "ddp_config", None)
    return bool(getattr(config, "fp8_param_gather", False)) and not getattr(config, "use_megatron_fsdp", False)


def gathers_by_gradients(member: Any) -> bool:
    """Return True if an optimizer gathers compute weights through gradient buffers, which overwrites the gradients."""
    return bool(getattr(getattr(member, "config", None), "reuse_grad_buf_for_mxfp8_param_ag", False))


@torch.no_grad()
def copy_masters(member: Any) -> None:
    """Compute this rank's range of the compute weights from master weights, as Megatron does after a step.

    Collective over the data-parallel replicas if :func:`is_quantised`.
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
    """Set compute weights to the values of the master weights that Adam keeps in its state.

    If Adam keeps only the lower 16 bits of master weights, compute weights are the upper 16 bits and stay as they are.
    """
    for group in inner.param_groups:
        for weight in group["params"]:
            master = inner.state[weight].get("master_param")
            if master is not None and master.dtype != torch.int16:
                weight.detach().copy_(inner.get_unscaled_state(weight, "master_param"))


@torch.no_grad()
def round_masters(member: Any) -> None:
    """Round master weights to the BF16 values from which MXFP8 weights are computed, and keep these values.

    Snapshots save these values in place of MXFP8 weights, which have codes by rows and codes by columns. Neither of the
    two can be computed from the other.
    """
    for parameter in getattr(member, "model_param_gbuf_map", ()):
        if (half := getattr(parameter, HALF, None)) is not None:
            half.copy_(parameter.main_param.view(-1))


def recompute_weights(chunks: Iterable[Any], optimizer: Any) -> None:
    """Recompute compute weights from master weights on all replicas, before training, if the two may not match.

    They have to match, because a recovery computes compute weights from master weights. They may not match in two kinds
    of job. When Megatron loads MXFP8 weights from a dense checkpoint, it dequantises and quantises them, which gives
    other codes. With master weights narrower than FP32, a new model has compute weights that are more precise.
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
    """Recompute this rank's range of compute weights if master weights are narrower than FP32; wait for no other rank.

    A replacement calls it after it has built its model, and then has the state with which the job started. FP8 weights
    with FP32 master weights are already correct on a newly built model. The next gather brings the ranges of other
    ranks.
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


def gather_matrices(optimizer: Any) -> None:
    """Send the matrices that each replica has updated to all replicas, for Muon with the distributed optimizer.

    Collective over the data-parallel replicas; without such an optimizer, the function does nothing.
    """
    for chain in layer_wise(optimizer):
        if not chain.use_buffer_param_sync:  # Otherwise, :func:`gather` has sent them.
            chain.allgather_params()


def gather(chunks: Iterable[Any], *, force: bool = False) -> None:
    """Send every replica's range of the compute weights to all replicas. Collective with the distributed optimizer.

    Without the distributed optimizer, each replica has all weights, and the function does nothing. MXFP8 weights are
    gathered through gradient buffers, which Megatron clears afterwards.

    Args:
        chunks: virtual stages in their data-parallel wrappers; duplicates are allowed.
        force: True to gather now, even if the next forward pass would gather (``--overlap-param-gather``).
    """
    for chunk in dict.fromkeys(chunks):
        if not chunk.ddp_config.use_distributed_optimizer:
            continue
        if force or not chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)
