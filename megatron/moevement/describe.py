"""Description of a job's shape from Megatron's flags, without running the job.

Megatron itself builds the model, so the description covers every model that Megatron can build. It builds the model
once for each pipeline stage, in this one process, on the meta device, which takes no memory. The process groups do not
communicate (torch's ``fake`` backend).
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import random
import sys
import warnings
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch

from megatron.moevement.operators import OperatorId, operators_of_chunk
from megatron.moevement.ownership import owned_by_ranks, steps_are_tensors, weights_in_fp8
from megatron.moevement.pipeline_parallel.sent_bytes import sends_per_micro_batch
from moevement_core.errors import ConfigError
from moevement_core.launching import config_file
from moevement_core.planning.job import JobShape, OperatorShape, StageShape, TensorPart
from moevement_core.precision import Regime, Scaling, TensorShape

# Values for flags that may need Transformer Engine, CUDA or DeepEP but do not affect shapes.
_NEUTRAL = {
    "transformer_impl": "local",
    "fp8": None,
    "fp8_param_gather": False,
    "reuse_grad_buf_for_mxfp8_param_ag": False,
    "fp4": None,
    "moe_grouped_gemm": False,
    "moe_token_dispatcher_type": "alltoall",
    "moe_flex_dispatcher_backend": "deepep",
    "use_precision_aware_optimizer": False,
    "main_params_dtype": "fp32",
    "exp_avg_dtype": "fp32",
    "exp_avg_sq_dtype": "fp32",
    "tp_comm_overlap": False,
    "gradient_accumulation_fusion": False,
}

_SCALINGS = {"blockwise": Scaling.BLOCK, "mxfp8": Scaling.MX}


def describe(name: str, flags: list[str], ranks: int) -> JobShape:
    """Return the shape of a job of ``ranks`` ranks with Megatron's ``flags``, which may include ``--config FILE``.

    The function starts nothing and needs no GPU. It leaves ``sys.argv``, the environment and Megatron's global state
    unchanged.

    Raises:
        ConfigError: Megatron refuses the flags, or they leave the model's sizes open.
    """
    with _quiet(), _untouched():
        args, regime = _parse(flags, ranks)
        stages = tuple(_stages(args))
    tokens = args.seq_length // args.context_parallel_size
    if args.sequence_parallel:
        tokens //= args.tensor_model_parallel_size
    element_bytes = 4 if args.params_dtype == torch.float32 else 2
    return JobShape(
        name=name,
        ranks=ranks,
        tensor_parallel=args.tensor_model_parallel_size,
        pipeline_parallel=args.pipeline_model_parallel_size,
        expert_parallel=args.expert_model_parallel_size,
        context_parallel=args.context_parallel_size,
        data_parallel=args.data_parallel_size,
        micro_batches=args.global_batch_size // (args.micro_batch_size * args.data_parallel_size),
        boundary_bytes=tokens * args.micro_batch_size * args.hidden_size * element_bytes,
        regime=regime,
        stages=stages,
        chunks=args.virtual_pipeline_model_parallel_size or 1,
        tokens=args.micro_batch_size * args.seq_length // args.context_parallel_size,
        experts_per_token=args.moe_router_topk if args.num_experts else 0,
        seq_length=args.seq_length,
        hidden_size=args.hidden_size,
    )


def _parse(flags: list[str], ranks: int) -> tuple[Namespace, Regime]:
    from megatron.moevement.activate import activate
    from megatron.moevement.preflight import one_line_errors, refuse, sizes
    from megatron.moevement.preflight.ranges import ranges

    activate()
    from megatron.training import arguments

    validate = getattr(arguments.validate_args, "_moevement_original", arguments.validate_args)
    words = config_file.expand(flags)
    names = {word.split("=")[0] for word in words}
    # A plan reads no data. Without data and a vocabulary, a run would train on the embedded corpus.
    mock = ["--mock-data"] if "--vocab-size" in names and "--data-path" not in names else []
    sys.argv = ["plan", *words, *mock]
    os.environ |= {"WORLD_SIZE": str(ranks), "RANK": "0"}
    args = arguments.parse_args()
    for complaints in (ranges, sizes.world_size):
        refuse(complaints(args))
    regime = _regime(args)
    for flag, value in _NEUTRAL.items():
        if hasattr(args, flag):
            setattr(args, flag, value)
    one_line_errors(validate, args, {"tokenizer_type": "NullTokenizer"})
    if args.vocab_size is None and args.padded_vocab_size is None:
        raise ConfigError("--vocab-size is missing; a plan reads no tokenizer, so give the size")
    return args, regime


def _regime(args: Namespace) -> Regime:
    """Return the number formats of weights, gradients and optimizer state that the flags ask for."""
    scaling = _SCALINGS.get(args.fp8_recipe, Scaling.TENSOR)
    step_bytes = 4 if steps_are_tensors() and not args.use_precision_aware_optimizer else 0
    if not (args.bf16 or args.fp16):
        return Regime("fp32", "fp32", "fp32", "fp32", step_bytes=step_bytes)
    half = "bf16" if args.bf16 else "fp16"
    compute = "fp8" if args.fp8_param_gather else half
    # Megatron's validation of arguments, which runs later, chooses the gradients' format in the same way.
    reduces_in_half = args.grad_reduce_in_bf16 if args.bf16 else not args.accumulate_allreduce_grads_in_fp32
    gradient = half if reduces_in_half or args.main_grads_dtype == "bf16" else "fp32"
    if not args.use_precision_aware_optimizer:
        return Regime(
            compute,
            master="fp32",
            first_moment="fp32",
            second_moment="fp32",
            scaling=scaling,
            gradient=gradient,
            step_bytes=step_bytes,
        )
    return Regime(
        compute,
        master=args.main_params_dtype,
        first_moment=args.exp_avg_dtype,
        second_moment=args.exp_avg_sq_dtype,
        scaling=scaling,
        gradient=gradient,
    )


def _stages(args: Namespace) -> Iterator[StageShape]:
    from megatron.training.argument_utils import gpt_config_from_args

    config = gpt_config_from_args(args)
    config.transformer.perform_initialization = False
    config.transformer.context_parallel_size = (
        1  # Values above 1 need Transformer Engine's attention, which has the same weights.
    )
    expert_tensor = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    expert_shards = args.world_size // (
        args.pipeline_model_parallel_size * args.expert_model_parallel_size * expert_tensor
    )
    dense_shards = args.data_parallel_size * args.context_parallel_size
    for stage in range(args.pipeline_model_parallel_size):
        tensors: dict[OperatorId, list[TensorShape]] = {}
        shards: dict[OperatorId, int] = {}
        places: dict[torch.nn.Parameter, tuple[OperatorId, int]] = {}
        with _pretended_groups(args, stage):
            chunks = [
                chunk.to(args.params_dtype)  # as Megatron's wrapper for half precision does
                for chunk in _chunks(config, args.virtual_pipeline_model_parallel_size)
            ]
            in_fp8 = {weight for chunk in chunks for weight in weights_in_fp8(chunk)}
            for chunk in chunks:
                for operator, _, parameter in operators_of_chunk(chunk, expert_rank=0):
                    shapes = tensors.setdefault(operator, [])
                    places[parameter] = operator, len(shapes)
                    shapes.append(TensorShape(parameter.numel(), len(parameter) if parameter in in_fp8 else 0))
                    shards[operator] = dense_shards if getattr(parameter, "allreduce", True) else expert_shards
            owned = {keeps: owned_by_ranks(args, chunks, stage, in_fp8 if keeps else set()) for keeps in (False, True)}
        operators = tuple(OperatorShape(o.name, o.kind, tuple(sizes), shards[o]) for o, sizes in tensors.items())
        if not operators:
            raise ConfigError(f"pipeline stage {stage} has no parameters; distribute the layers over fewer stages")
        index = {operator: number for number, operator in enumerate(tensors)}
        ranks = {
            keeps: tuple(
                tuple(
                    TensorPart(index[places[parameter][0]], places[parameter][1], elements)
                    for parameter, elements in rank.items()
                )
                for rank in by_rank
            )
            for keeps, by_rank in owned.items()
        }
        yield StageShape(operators, sends_per_micro_batch(args, stage), ranks)


def _chunks(config: Any, virtual: int | None) -> Iterator[Any]:
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection.use_mpu_process_groups()
    builder = config.get_builder_cls()(config)
    for chunk in range(virtual or 1):
        with _meta_device():
            yield builder.build_model(groups, vp_stage=chunk if virtual else None)


@contextlib.contextmanager
def _pretended_groups(args: Namespace, stage: int) -> Iterator[None]:
    """Make the process groups of the first rank of ``stage``, without communication, for a ``with`` block.

    The pretended job has as few ranks as the parallel sizes allow.
    """
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if torch.distributed.is_initialized():
        raise ConfigError(
            "this process is a rank of a job, and cannot describe a job; call describe() in another process"
        )
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    expert = args.expert_model_parallel_size * (args.expert_tensor_parallel_size or tensor)
    world = pipeline * math.lcm(tensor, expert)
    torch.distributed.init_process_group("fake", rank=stage * (world // pipeline), world_size=world, store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(
            tensor,
            pipeline,
            args.virtual_pipeline_model_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
            create_gloo_process_groups=False,
        )
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


@contextlib.contextmanager
def _meta_device() -> Iterator[None]:
    """Create tensors without memory in a ``with`` block, even where Megatron asks for the current CUDA device."""
    current_device = torch.cuda.current_device
    torch.cuda.current_device = lambda: torch.device("meta")  # type: ignore[assignment,return-value]
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.cuda.current_device = current_device


@contextlib.contextmanager
def _untouched() -> Iterator[None]:
    """Restore ``sys.argv``, environment, random states and Megatron's parallel state at the end of a ``with`` block."""
    from megatron.core import parallel_state

    argv, environment, hook = sys.argv, dict(os.environ), sys.excepthook
    states = random.getstate(), torch.get_rng_state()
    parallel = {name: value for name, value in vars(parallel_state).items() if not callable(value)}
    try:
        yield
    finally:
        sys.argv = argv
        sys.excepthook = hook  # Torch sets a hook whose error messages name a rank.
        os.environ.clear()
        os.environ.update(environment)
        random.setstate(states[0])
        torch.set_rng_state(states[1])
        vars(parallel_state).update(parallel)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress Megatron's output and warnings, because they concern training and not a description."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
