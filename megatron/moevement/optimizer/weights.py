"""Compute weights from master weights, and to all replicas: the end of an update, and of a restore.

Weights in FP8 (``--fp8-param-gather``) need the largest master weights of all replicas for their scales. So they are
made where parameters are gathered, which may be interrupted and done again, and not where the update is made, which
waits for nobody.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from megatron.moevement.fp8.delayed import remaking
from megatron.moevement.fp8.shards import post_all_gather_processing
from megatron.moevement.state_digest import members

HALF = "moevement_half"
"""Attribute of an MXFP8 parameter: its range in BF16, rounded from the master weights (``optimizer/views.py``)."""


def is_quantised(member: Any) -> bool:
    """Return whether an optimizer's compute weights are in FP8 and their scales reduced over replicas."""
    config = getattr(member, "ddp_config", None)
    return bool(getattr(config, "fp8_param_gather", False)) and not getattr(config, "use_megatron_fsdp", False)


def gathers_by_gradients(member: Any) -> bool:
    """Return whether an optimizer's compute weights are gathered through its gradient buffers,
    which lose the gradients.
    """
    return bool(getattr(getattr(member, "config", None), "reuse_grad_buf_for_mxfp8_param_ag", False))


@torch.no_grad()
def copy_masters(member: Any) -> None:
    """Master weights over this rank's range of the compute weights, as Megatron does after a step.

    Where :func:`is_quantised`, called by every replica.
    """
    if getattr(member, "is_stub_optimizer", False):
        return
    if getattr(member.config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", False):
        _write_weights(member.optimizer)
        if is_quantised(member):  # those of which this rank owns nothing have another scale now, too
            post_all_gather_processing([weight for buffer in member.buffers for weight in buffer.params])
    elif gathers_by_gradients(member):
        member._copy_main_params_to_param_buffer()
    elif hasattr(member, "_copy_main_params_to_model_params"):
        member._copy_main_params_to_model_params()


def _write_weights(inner: Any) -> None:
    """Write weights from master weights that the optimizer keeps; a weight that is half of its
    master is there already.
    """
    for group in inner.param_groups:
        for weight in group["params"]:
            master = inner.state[weight].get("master_param")
            if master is not None and master.dtype != torch.int16:
                weight.detach().copy_(inner.get_unscaled_state(weight, "master_param"))


@torch.no_grad()
def round_masters(member: Any) -> None:
    """Round masters to what MXFP8 weights are made from, as snapshots save it; neither of their two forms can be made
    from the other.
    """
    for parameter in getattr(member, "model_param_gbuf_map", ()):
        if (half := getattr(parameter, HALF, None)) is not None:
            half.copy_(parameter.main_param.view(-1))


def make_again(chunks: Iterable[Any], optimizer: Any) -> None:
    """Weights that are not what their master weights say, from the master weights, on all replicas; before training.

    Weights in FP8 that a dense checkpoint has brought: Megatron quantises the checkpoint's, which were dequantised
    for it, and gets other codes where a recipe does not quantise its own output to itself (MXFP8). And weights at the
    start of a run whose optimizer keeps narrower masters: those are made from the weights, with fewer of their small
    numbers, and a recovery has only the masters.
    """
    make_own_again(optimizer)
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
def make_own_again(optimizer: Any) -> None:
    """The part of :func:`make_again` that waits for nobody: this rank's range, where masters are narrow.

    All that a rank which is new in a running job needs to be as it was when the job began: FP8 weights that come from
    FP32 masters are as a model is built, and other ranges come with the next gather.
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
    """Every replica's range of the compute weights to all of them.

    Each virtual stage once, though dense weights and experts have optimizers of their own: MXFP8 weights are gathered
    by way of gradient buffers, which are cleared after it.

    Args:
        chunks: in their data-parallel wrappers; one may be named several times.
        force: also where the next forward pass gathers (``--overlap-param-gather``).
    """
    for chunk in dict.fromkeys(chunks):
        if not chunk.ddp_config.use_distributed_optimizer:
            continue
        if force or not chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)
