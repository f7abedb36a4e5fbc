"""Adaptations of Megatron to the CPU and gloo, where Megatron expects CUDA and NCCL.

Every call of ``replace`` or ``wrap`` names the function of Megatron that it replaces, and the reason.
``tests/unit/megatron/test_platform.py`` tests each replacement.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron.moevement.fp8 import install as fp8
from megatron.moevement.patches import replace, wrap
from megatron.moevement.quiet_imports import quiet_imports


def install() -> None:
    """Replace the names below; idempotent. The function imports Megatron's trainer."""
    with _eager_jit_fuser(), quiet_imports():
        import_module("megatron.training.training")

    import megatron.training.training as training
    from megatron.core.dist_checkpointing.strategies import filesystem_async as mcore_writer
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
    from megatron.core.tensor_parallel import random as tp_random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    from megatron.training import initialize

    replace(tp_random, "_set_cuda_rng_state", _set_rng_state, "reaches for torch.cuda.default_generators")
    # The tracker warns if its context changes the host's generator. On a CPU, that generator is the one in use.
    logging.getLogger(tp_random.__name__).addFilter(_is_no_host_rng_warning)
    wrap(
        token_dispatcher,
        "maybe_move_tensor_to_cpu",
        _as_numpy_on_cpu,
        "skips .numpy() for CPU tensors, so all-to-all would get split sizes as tensors",
    )
    if not hasattr(moe_utils, "te_general_gemm"):
        replace(moe_utils, "te_general_gemm", None, "stays undefined without Transformer Engine")
    for owner in (initialize, training):
        wrap(
            owner,
            "initialize_megatron",
            lambda original, *args, **kwargs: original(*args, allow_no_cuda=True, **kwargs),
            "asserts CUDA unless asked otherwise",
        )
    wrap(
        mcore_writer.FileSystemWriterAsync,
        "prepare_write_data",
        _with_copies,
        "aliases CPU tensors, which training would change under the writer",
    )
    replace(
        param_and_grad_buffer,
        "_coalescing_manager",
        _one_by_one,
        "coalesces, which over gloo corrupts the heap (torch 2.13.0; scripts/coalesced_gloo.py crashes in a minute)",
    )
    replace(
        LayerWiseDistributedOptimizer,
        "allgather_params",
        LayerWiseDistributedOptimizer.broadcast_params,
        "gathers a different number of weights from each rank, which gloo refuses; broadcasts send the same weights",
    )
    fp8.install()


@contextmanager
def _eager_jit_fuser() -> Iterator[None]:
    """Replace ``torch.compile`` in a ``with`` block that imports Megatron, so that Megatron compiles nothing.

    Megatron's decorator ``jit_fuser`` is ``torch.compile``, and decorates functions at import. On a CPU, every rank
    would compile C++ code in the first iteration.
    """
    compile_ = torch.compile

    def eager(function: Any = None, **kwargs: Any) -> Any:
        return function if function is not None else lambda decorated: decorated

    torch.compile = eager  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile_


def _set_rng_state(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


def _is_no_host_rng_warning(record: logging.LogRecord) -> bool:
    return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


def _as_numpy_on_cpu(
    original: Callable[..., Any], tensor: Any, as_numpy: bool = False, record_stream: bool = False
) -> Any:
    if as_numpy and torch.is_tensor(tensor):
        return tensor.numpy()
    return tensor


def _with_copies(original: Callable[..., Any], writer: Any, *args: Any, **kwargs: Any) -> Any:
    """Copy the tensors of a dense save, in place of ``prepare_write_data``.

    On a GPU, Megatron copies these tensors to the host. On a CPU it makes no copy, so the writer process would read
    weights that training is changing.
    """
    result = original(writer, *args, **kwargs)
    writer.write_buckets = [
        (path, key, (items, [(item, tensor.clone()) for item, tensor in tensors]))
        for path, key, (items, tensors) in writer.write_buckets
    ]
    return result


class _Works:
    """Handle that waits for all collectives of one :func:`_one_by_one` block."""

    def __init__(self) -> None:
        self.works: list[dist.Work] = []

    def wait(self) -> None:
        """Block until all operations are complete."""
        for work in self.works:
            work.wait()


@contextmanager
def _one_by_one(
    group: dist.ProcessGroup, device: torch.device | None = None, async_ops: bool = False
) -> Iterator[_Works]:
    """Collect collectives as torch's coalescing manager does, and issue them one by one at the end of the block."""
    works, collected = _Works(), distributed_c10d._world.pg_coalesce_state
    collected[group] = []
    try:
        yield works
    finally:
        collectives = collected.pop(group)
    for collective in collectives:
        tensors = [collective.tensor] if collective.dst_tensor is None else [collective.dst_tensor, collective.tensor]
        reduction = {} if collective.redop is None else {"op": collective.redop}
        if (work := collective.op(*tensors, group=group, async_op=True, **reduction)) is not None:
            works.works.append(work)
    if not async_ops:
        works.wait()
