"""Flags that cannot work are refused before a model is built, in one line with flag, value and remedy."""

from __future__ import annotations

import os
import re
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.moevement.preflight import machine, spares
from moevement_cli.main import main
from moevement_core.errors import ConfigError
from tests.training import flags


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Namespace]:
    """Return a function that parses and validates the tiny model's flags with changes, for ``world_size`` ranks."""
    from megatron.moevement.activate import activate

    activate()
    from megatron.training import arguments

    def run(world_size: int = 1, *words: str, **changes: Any) -> Namespace:
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setattr("sys.argv", ["script", *flags(**changes), *words])
        args = arguments.parse_args()
        arguments.validate_args(args, {})
        return args

    return run


def test_the_tiny_model_passes(parse: Callable[..., Namespace]) -> None:
    args = parse(4, pipeline_model_parallel_size=2, expert_model_parallel_size=2)
    assert args.distributed_backend == "gloo"
    assert args.data_parallel_size == 2


def test_variables_of_attention_kernels_mean_nothing_without_a_gpu(
    parse: Callable[..., Namespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVTE_FLASH_ATTN", "1")
    parse()
    assert "NVTE_FLASH_ATTN" not in os.environ


def test_variables_of_attention_kernels_agree_with_the_backend(
    parse: Callable[..., Namespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = parse()
    monkeypatch.setattr("megatron.moevement.platform.is_cpu", lambda: False)
    assert list(machine.attention(args)) == []
    monkeypatch.setenv("NVTE_FUSED_ATTN", "1")
    (complaint,) = machine.attention(args)
    assert re.search(r"\bNVTE_FUSED_ATTN=1\b.*--attention-backend unfused\b.*\b0\b", complaint)


def test_flags_that_no_abort_ends_are_found_as_megatron_parses_them(
    parse: Callable[..., Namespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the names in the parsed namespace, which can differ from those on the command line."""
    args = parse()
    assert [getattr(args, name) for name in ("nccl_ub", "tp_comm_overlap", "inprocess_restart")] == [False] * 3
    monkeypatch.setenv("MOEVEMENT_MEMBER", "0")
    monkeypatch.setattr("megatron.moevement.platform.is_cpu", lambda: False)
    assert list(spares.spares(args)) == []


def test_muon_needs_its_package(parse: Callable[..., Namespace], monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse(1, optimizer="muon").optimizer == "muon"
    monkeypatch.setitem(sys.modules, "emerging_optimizers", None)
    with pytest.raises(ConfigError, match=r"--optimizer muon\b.*\bemerging_optimizers\b"):
        parse(1, optimizer="muon")


BAD: dict[str, tuple[int, dict[str, Any], str]] = {
    "mode of reruns": (1, {"rerun_mode": "report_stats"}, r"--rerun-mode report_stats\b.*\bvalidate_results\b.*\bdisabled\b"),
    "experts by EP": (4, {"expert_model_parallel_size": 4, "num_experts": 6}, r"--num-experts 6\b.*--expert-model-parallel-size 4\b.*\b4\b.*\b8\b"),
    "EP without experts": (2, {"expert_model_parallel_size": 2, "num_experts": False, "moe_router_topk": False}, r"--expert-model-parallel-size 2\b.*--num-experts\b(?! \d)"),
    "world by EP": (3, {"expert_model_parallel_size": 2}, r"--expert-model-parallel-size 2\b.*\b3\b.*--pipeline-model-parallel-size 1\b"),
    "topk": (1, {"moe_router_topk": 5}, r"--moe-router-topk 5\b.*--num-experts 4\b.*\b4\b"),
    "layers by PP": (3, {"pipeline_model_parallel_size": 3}, r"--num-layers 4\b.*--pipeline-model-parallel-size 3\b.*\b3\b.*\b6\b"),
    "layers by VPP": (2, {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 3}, r"--num-virtual-stages-per-pipeline-rank 3\b.*\b2\b.*--num-layers 4\b"),
    "layers by chunk": (2, {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 4}, r"--num-layers-per-virtual-pipeline-stage 4\b.*\b2\b.*--num-layers 4\b"),
    "VPP without PP": (1, {"num_virtual_stages_per_pipeline_rank": 2}, r"--num-virtual-stages-per-pipeline-rank 2\b.*--pipeline-model-parallel-size 2\b.*\b1\b"),
    "world size": (3, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, r"\b3\b.*--tensor-model-parallel-size 2\b.*--nproc\b"),
    "heads by TP": (4, {"tensor_model_parallel_size": 4, "sequence_parallel": True, "num_attention_heads": 2}, r"--num-attention-heads 2\b.*--tensor-model-parallel-size 4\b"),
    "hidden by heads": (1, {"num_attention_heads": 5}, r"--hidden-size 32\b.*--num-attention-heads 5\b"),
    "TP experts without SP": (2, {"tensor_model_parallel_size": 2}, r"--tensor-model-parallel-size 2\b.*--sequence-parallel\b"),
    "sequence length": (1, {"seq_length": 64}, r"--seq-length 64\b.*--max-position-embeddings 32\b.*\b64\b"),
    "sequence by TP": (4, {"tensor_model_parallel_size": 4, "sequence_parallel": True, "seq_length": 30}, r"--seq-length 30\b.*--tensor-model-parallel-size 4\b.*\b28\b.*\b32\b"),
    "global batch": (3, {}, r"--global-batch-size 8\b.*\b6\b.*--micro-batch-size 2\b.*\b3\b.*\b6\b.*\b12\b"),
    "interleaved batch": (2, {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2, "global_batch_size": 6}, r"--global-batch-size 6\b.*--pipeline-model-parallel-size 2\b.*\b4\b.*\b8\b"),
    "missing data": (1, {"data_path": "/nowhere/text"}, r"--data-path /nowhere/text\b(?!\.).*/nowhere/text\.bin\b.*moevement data build\b"),
    "data with suffix": (1, {"data_path": "/nowhere/text.bin"}, r"--data-path /nowhere/text\.bin\b.*\bsuffix\b"),
    "missing blend": (1, {"data_path": ["0.5", "/nowhere/a", "0.5", "/nowhere/b"]}, r"/nowhere/a\.bin\b"),
    "missing tokenizer": (1, {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "/nowhere/t", "mock_data": True}, r"--tokenizer-model /nowhere/t\b"),
    "tokenizer without data": (1, {"tokenizer_type": "HuggingFaceTokenizer"}, r"--tokenizer-type HuggingFaceTokenizer\b.*--data-path\b"),
    "context parallel": (2, {"context_parallel_size": 2}, r"--context-parallel-size 2\b.*\bTransformer Engine\b.*\bGPU\b"),
    "nccl": (1, {"distributed_backend": "nccl"}, r"--distributed-backend nccl\b.*\bGPU\b.*\bgloo\b"),
    "transformer engine": (1, {"transformer_impl": "transformer_engine"}, r"--transformer-impl transformer_engine\b.*--transformer-impl local\b"),
    "fp8": (1, {"fp8_format": "e4m3", "fp8_recipe": "custom", "fp8_quantizer_factory": "a.b"}, r"--fp8-recipe custom\b.*\bGPU\b"),
    "mxfp8 weights": (1, {"bf16": True, "fp8_format": "e4m3", "fp8_recipe": "mxfp8", "use_distributed_optimizer": True, "fp8_param_gather": True}, r"--fp8-recipe mxfp8\b.*--reuse-grad-buf-for-mxfp8-param-ag\b"),
    "fp16 gradients": (1, {"bf16": False, "fp16": True, "use_distributed_optimizer": True, "use_precision_aware_optimizer": True}, r"--fp16\b.*--accumulate-allreduce-grads-in-fp32\b"),
    "fp8 masters": (1, {"bf16": True, "fp8_format": "e4m3", "fp8_recipe": "tensorwise", "use_distributed_optimizer": True, "fp8_param_gather": True, "use_precision_aware_optimizer": True, "main_params_dtype": "fp16"}, r"--main-params-dtype fp16\b.*--main-params-dtype fp32\b"),
    "fp8 and a loss scale": (1, {"fp16": True, "fp8_format": "e4m3", "fp8_recipe": "delayed", "use_distributed_optimizer": True, "fp8_param_gather": True, "overlap_grad_reduce": True, "overlap_param_gather": True}, r"--overlap-param-gather\b.*--loss-scale\b"),
    "fp8 and recomputed projections": (1, {"bf16": True, "fp8_format": "e4m3", "fp8_recipe": "delayed", "recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}, r"--recompute-modules mla_up_proj\b.*--fp8-recipe delayed\b"),
    "mxfp8 logits": (1, {"fp8_format": "e4m3", "fp8_recipe": "mxfp8", "fp8_output_proj": True}, r"--fp8-output-proj\b.*\bGPU\b"),
    "flex": (1, {"moe_token_dispatcher_type": "flex"}, r"--moe-token-dispatcher-type flex\b.*\bGPU\b"),
    "expert TP on gloo": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 2}, r"--expert-tensor-parallel-size 2\b.*\bgloo\b"),
    "expert biases": (1, {"disable_bias_linear": False}, r"--num-experts\b.*--disable-bias-linear\b"),
    "CPU initialization": (2, {"expert_model_parallel_size": 2, "use_cpu_initialization": True}, r"--use-cpu-initialization\b.*--expert-model-parallel-size 2\b"),
    "warmup": (1, {"lr_warmup_iters": 4, "lr_decay_iters": False}, r"--lr-warmup-iters 4\b.*--train-iters 4\b"),
    "warmup and decay": (1, {"lr_warmup_iters": 200}, r"--lr-warmup-iters 200\b.*--lr-decay-iters 100\b"),
    "no learning rate": (1, {"lr": False}, r"--lr\b(?!-)"),
    "split of words": (1, {"split": "abc"}, r"--split abc\b.*\b95,4,1\b"),
    "split without validation": (1, {"split": "100,0,0", "eval_iters": 1}, r"--split 100,0,0\b.*--eval-iters 0\b"),
    "sgd": (1, {"optimizer": "sgd", "use_distributed_optimizer": True}, r"--optimizer sgd\b.*\bAdam\b"),
    "muon by layers, overlapped": (1, {"optimizer": "muon", "use_distributed_optimizer": True, "bf16": True, "overlap_param_gather": True, "overlap_grad_reduce": True}, r"--optimizer muon\b.*--overlap-param-gather\b.*\bgloo\b"),
    "muon by layers in FP32": (1, {"optimizer": "muon", "use_distributed_optimizer": True}, r"--optimizer muon\b.*--use-distributed-optimizer\b.*--bf16\b"),
    "sinkhorn": (1, {"moe_router_load_balancing_type": "sinkhorn"}, r"--moe-router-load-balancing-type sinkhorn\b.*--moe-aux-loss-coeff 0\b"),
    "log interval": (1, {"log_interval": 0}, r"--log-interval 0\b.*\b1\b"),
    "load a file": (1, {"load": __file__}, r"--load \S*/test_preflight\.py\b.*\bfolder\b"),
    "vocabulary of the corpus": (1, {"vocab_size": 100}, r"--vocab-size 100\b.*--data-path\b.*\b257\b"),
    "negative": (1, {"num_layers": -4}, r"--num-layers -4\b.*\b1\b"),
    "zero seed": (1, {"seed": 0}, r"--seed 0\b.*\b1\b"),
    "no length": (1, {"train_iters": False}, r"--train-iters\b(?! \d)"),
    "no eval interval": (1, {"eval_interval": False}, r"--eval-interval\b(?! \d)"),
    "no layers": (1, {"num_layers": False}, r"--num-layers(?!-| -?\d)"),
    "save without interval": (1, {"save": "/tmp/x"}, r"--save-interval\b(?! \d)"),
    "router groups": (1, {"moe_router_num_groups": 3, "moe_router_group_topk": 1}, r"--moe-router-num-groups 3\b.*--num-experts 4\b"),
    "Megatron's own assertion": (1, {"overlap_param_gather": True}, r"\bMegatron\b.*--overlap-param-gather\b"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_flags_are_named(name: str, parse: Callable[..., Namespace]) -> None:
    world_size, changes, message = BAD[name]
    with pytest.raises(ConfigError) as caught:
        parse(world_size, **changes)
    assert re.search(message, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--num-layer", "3"], r"--num-layer\b.*--num-layers\b"),
        (["--pipeline-parallel-size", "2"], r"--pipeline-parallel-size\b.*--pipeline-model-parallel-size\b"),
        (["--zzz"], r"--zzz\b.*--help\b"),
        (["--hidden-size", "many"], r"--hidden-size\b.*'many'"),
        (["stray"], "'stray'"),
        (["--moe-token-dispatcher-type", "alltoal"], r"--moe-token-dispatcher-type\b.*'alltoal'.*'alltoall'"),
    ],
)
def test_flags_that_do_not_parse_are_named(words: list[str], named: str, parse: Callable[..., Namespace]) -> None:
    with pytest.raises(ConfigError, match=named):
        parse(1, *words)


@pytest.mark.parametrize(
    "flag", ["--run-dir", "--moevement-persist-dir", "--moevement-load", "--moevement-inject-trace"]
)
@pytest.mark.parametrize("empty", ["", " "])
def test_a_path_from_a_variable_that_is_not_set_is_refused(
    flag: str, empty: str, parse: Callable[..., Namespace]
) -> None:
    with pytest.raises(ConfigError, match=f"{flag} '{empty}'"):
        parse(1, "--moevement-sparse-ckpt", flag, empty)
    with pytest.raises(ConfigError, match=f"{flag} '{empty}'"):
        parse(1, flag, empty)


def test_the_coordinator_refuses_an_empty_run_directory_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["coordinate", "--ranks", "2", "--run-dir", ""])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(r"--run-dir\b.*''", line)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--port", "70000"], r"--port 70000\b.*\b0\b.*\b65535\b"),
        (["--host", ""], r"--host ''"),
        (["--spare-timeout", "nan"], r"--spare-timeout nan\b.*\b0\b.*\binf\b"),
    ],
)
def test_what_cannot_be_coordinated_is_said(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["coordinate", "--ranks", "2", *words])
    assert caught.value.code == 2
    assert re.fullmatch(f"moevement: .*{named}.*\n", capsys.readouterr().err)


def test_help_of_the_whole_parser_still_works(
    parse: Callable[..., Namespace], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(1, "--help")
    assert caught.value.code == 0
    assert "--run-dir" in capsys.readouterr().out


def test_a_run_directory_gets_tensorboard(parse: Callable[..., Namespace], tmp_path: Path) -> None:
    args = parse(1, "--run-dir", str(tmp_path))
    assert args.tensorboard_dir == str(tmp_path / "tensorboard")


def test_a_split_that_leaves_no_document_is_refused(parse: Callable[..., Namespace], tmp_path: Path) -> None:
    """Check the refusal of a split with an empty part, in which Megatron would search for samples forever."""
    text, prefix = tmp_path / "text", tmp_path / "tokens"
    text.write_text("a line\n" * 20)
    data_flags = {"data_path": str(prefix), "tokenizer_type": "NullTokenizer", "vocab_size": 257, "eval_iters": 1}
    assert main(["data", "build", str(text), "--output", str(prefix), "--documents", "line"]) == 0
    parse(split="80,10,10", **data_flags)
    with pytest.raises(ConfigError, match=r"--split 98,2,0\b.*\b20\b.*--data-path \S*/tokens\b.*\bvalidation\b"):
        parse(split="98,2,0", **data_flags)
    parse(split="98,2,0", **data_flags | {"eval_iters": 0})
    assert main(["data", "build", str(text), "--output", str(prefix), "--overwrite"]) == 0
    with pytest.raises(ConfigError, match=r"--split 40,30,30\b.*\b1\b.*--data-path \S*/tokens\b.*\btraining\b"):
        parse(split="40,30,30", **data_flags)


def test_workers_without_shared_memory_are_refused(
    parse: Callable[..., Namespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        f_bavail, f_frsize = 3, 4096

    monkeypatch.setattr(machine.os, "statvfs", lambda path: Full)
    parse()  # without workers, no data goes through shared memory
    with pytest.raises(ConfigError, match=r"--num-workers 2\b.* /dev/shm\b.*\b0\.0 MB\b.*--num-workers 0\b"):
        parse(num_workers=2)


def test_batches_that_would_not_grow_are_refused_with_the_flag_that_lets_them(parse: Callable[..., Namespace]) -> None:
    with pytest.raises(ConfigError, match=r"--rampup-batch-size 4 4 24\b.*--step-batch-size-schedule"):
        parse(1, "--rampup-batch-size", "4", "4", "24")
