"""Pretrain a GPT mixture-of-experts model with Megatron's own trainer."""

from __future__ import annotations

import time

PROGRAM_START_S = time.time()

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import (
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
    get_model_config,
)
from megatron.training import get_args, get_timers, inprocess_restart, pretrain, set_startup_timestamps
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

BATCH_FIELDS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")


def get_batch(
    data_iterator: Iterator[dict[str, Any]] | None, vp_stage: int | None, config: TransformerConfig
) -> dict[str, Any]:
    """Return this rank's part of the next micro-batch. On a stage that reads no data, all fields are None.

    Tensor-parallel rank 0 reads and broadcasts the batch, and context-parallel ranks take their slice of the sequence.
    ``tokens``, ``labels`` and ``position_ids`` are int64 ``[micro_batch_size, seq_length / CP]``, and ``loss_mask`` is
    float32 of the same shape.
    """
    if not is_first_or_last_pipeline_stage(vp_stage):
        return dict.fromkeys(BATCH_FIELDS)
    args = get_args()
    batch: dict[str, Any] = {}
    if mpu.get_tensor_model_parallel_rank() == 0:
        assert data_iterator is not None
        sample = next(data_iterator)
        batch = {
            key: value.cuda(non_blocking=True) if isinstance(value, torch.Tensor) else None
            for key, value in {**dict.fromkeys(BATCH_FIELDS), **sample}.items()
        }
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=mtp_on_this_rank(config.pipeline_model_parallel_layout, config.mtp_num_layers),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    batch.setdefault("cu_seqlens", None)
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())


def language_model_loss(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Return the sum of the token losses, the number of tokens, and both as one report for the log.

    Megatron itself divides the sum by the number of tokens (or micro-batches). If the loss is NaN or infinite,
    Megatron's rerun machinery executes the micro-batch again to distinguish a broken device from broken mathematics.
    """
    mask = loss_mask.view(-1).float()
    loss = torch.sum(losses.view(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    if get_args().check_for_nan_in_loss_and_grad:
        for is_bad, what in ((torch.isnan, "NaN"), (torch.isinf, "infinity")):
            get_rerun_state_machine().validate_result(
                result=loss,
                rejection_func=is_bad,
                message=f"found {what} in the loss of a micro-batch",
                tolerance=0.0,
                fatal=True,
            )
    report = torch.cat([loss.detach().view(1), num_tokens.view(1).to(loss.dtype)])
    return loss, num_tokens, {"lm loss": report}


def forward_step(data_iterator: Iterator[dict[str, Any]] | None, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """Execute the forward pass of one micro-batch; Megatron's schedules call it."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"), get_model_config(model))
    timers("batch-generator").stop()
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, partial(language_model_loss, batch["loss_mask"])


def datasets_provider(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Return Megatron's train, validation and test ``GPTDataset``, built on the ranks that read data."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
    )

    def reads_data() -> bool:
        return is_first_or_last_pipeline_stage(vp_stage) and mpu.get_tensor_model_parallel_rank() == 0

    dataset = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(dataset, num_samples, reads_data, config).build()


datasets_provider.is_distributed = True  # type: ignore[attr-defined]  # so that Megatron calls it on every rank


def main() -> None:
    """Parse Megatron's flags and start Megatron's trainer."""
    set_startup_timestamps(program_start=PROGRAM_START_S, main_entry=time.time())
    train, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    train(config, datasets_provider, ModelType.encoder_or_decoder, forward_step, store=store)


if __name__ == "__main__":
    main()
