"""What cannot work is said in one line naming flag, value and remedy, before anything is built."""

from __future__ import annotations

import os
import re
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.moevement.preflight import machine
from moevement_cli.main import main
from moevement_core.errors import ConfigError
from tests.training import flags


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Namespace]:
    """Parse and validate the tiny model's flags with changes, as ``world_size`` ranks would."""
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
    assert complaint.startswith("NVTE_FUSED_ATTN=1 with --attention-backend unfused, for which Megatron sets it to 0;")


def test_muon_needs_its_package(parse: Callable[..., Namespace], monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse(1, optimizer="muon").optimizer == "muon"
    monkeypatch.setitem(sys.modules, "emerging_optimizers", None)
    with pytest.raises(ConfigError, match="--optimizer muon: needs the package emerging_optimizers; install it"):
        parse(1, optimizer="muon")


BAD: dict[str, tuple[int, dict[str, Any], str]] = {
    "mode of reruns": (1, {"rerun_mode": "report_stats"}, "--rerun-mode report_stats: Megatron's parser takes it .*; give validate_results or disabled"),
    "experts by EP": (4, {"expert_model_parallel_size": 4, "num_experts": 6}, r"--num-experts 6: .*--expert-model-parallel-size 4; use 4 or 8"),
    "EP without experts": (2, {"expert_model_parallel_size": 2, "num_experts": False, "moe_router_topk": False}, "--expert-model-parallel-size 2: the model has no experts"),
    "world by EP": (3, {"expert_model_parallel_size": 2}, "--expert-model-parallel-size 2: world size 3"),
    "topk": (1, {"moe_router_topk": 5}, "--moe-router-topk 5: more than --num-experts 4; use 4"),
    "layers by PP": (3, {"pipeline_model_parallel_size": 3}, "--num-layers 4: not a multiple of --pipeline-model-parallel-size 3; use 3 or 6"),
    "layers by VPP": (2, {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 3}, "--num-virtual-stages-per-pipeline-rank 3: does not divide the 2 layers"),
    "layers by chunk": (2, {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 4}, "--num-layers-per-virtual-pipeline-stage 4: does not divide"),
    "VPP without PP": (1, {"num_virtual_stages_per_pipeline_rank": 2}, "interleaving needs --pipeline-model-parallel-size 2 or more"),
    "world size": (3, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, "world size 3: not a multiple of 2"),
    "heads by TP": (4, {"tensor_model_parallel_size": 4, "sequence_parallel": True, "num_attention_heads": 2}, "--num-attention-heads 2: not a multiple of --tensor-model-parallel-size 4"),
    "hidden by heads": (1, {"num_attention_heads": 5}, "--hidden-size 32: not a multiple of --num-attention-heads 5"),
    "TP experts without SP": (2, {"tensor_model_parallel_size": 2}, "add --sequence-parallel"),
    "sequence length": (1, {"seq_length": 64}, "--seq-length 64: longer than --max-position-embeddings 32; raise the latter to 64"),
    "sequence by TP": (4, {"tensor_model_parallel_size": 4, "sequence_parallel": True, "seq_length": 30}, "--seq-length 30: not a multiple of --tensor-model-parallel-size 4"),
    "global batch": (3, {}, r"--global-batch-size 8: not a multiple of 6 = --micro-batch-size 2 x 3 data-parallel ranks; use 6 or 12"),
    "interleaved batch": (2, {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2, "global_batch_size": 6}, "needs a multiple of --pipeline-model-parallel-size 2; use 4 or 8"),
    "missing data": (1, {"data_path": "/nowhere/text"}, r"--data-path /nowhere/text: no /nowhere/text\.bin; moevement data build"),
    "data with suffix": (1, {"data_path": "/nowhere/text.bin"}, "leave the suffix out"),
    "missing blend": (1, {"data_path": ["0.5", "/nowhere/a", "0.5", "/nowhere/b"]}, r"no /nowhere/a\.bin"),
    "missing tokenizer": (1, {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "/nowhere/t", "mock_data": True}, "--tokenizer-model /nowhere/t: no such file"),
    "tokenizer without data": (1, {"tokenizer_type": "HuggingFaceTokenizer"}, "the embedded corpus is bytes"),
    "context parallel": (2, {"context_parallel_size": 2}, "--context-parallel-size 2: .*Transformer Engine"),
    "nccl": (1, {"distributed_backend": "nccl"}, "--distributed-backend nccl: no GPU here"),
    "transformer engine": (1, {"transformer_impl": "transformer_engine"}, "Transformer Engine is not installed"),
    "fp8": (1, {"fp8_format": "e4m3", "fp8_recipe": "custom", "fp8_quantizer_factory": "a.b"}, "--fp8-recipe custom: needs a GPU"),
    "mxfp8 weights": (1, {"bf16": True, "fp8_format": "e4m3", "fp8_recipe": "mxfp8", "use_distributed_optimizer": True, "fp8_param_gather": True}, "add --reuse-grad-buf-for-mxfp8-param-ag"),
    "fp16 gradients": (1, {"bf16": False, "fp16": True, "use_distributed_optimizer": True, "use_precision_aware_optimizer": True}, "add --accumulate-allreduce-grads-in-fp32"),
    "fp8 masters": (1, {"bf16": True, "fp8_format": "e4m3", "fp8_recipe": "tensorwise", "use_distributed_optimizer": True, "fp8_param_gather": True, "use_precision_aware_optimizer": True, "main_params_dtype": "fp16"}, "give --main-params-dtype fp32"),
    "fp8 and a loss scale": (1, {"fp16": True, "fp8_format": "e4m3", "fp8_recipe": "delayed", "use_distributed_optimizer": True, "fp8_param_gather": True, "overlap_grad_reduce": True, "overlap_param_gather": True}, "with a loss scale"),
    "fp8 and recomputed projections": (1, {"bf16": True, "fp8_format": "e4m3", "fp8_recipe": "delayed", "recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}, "other scales"),
    "mxfp8 logits": (1, {"fp8_format": "e4m3", "fp8_recipe": "mxfp8", "fp8_output_proj": True}, "--fp8-output-proj: needs a GPU"),
    "flex": (1, {"moe_token_dispatcher_type": "flex"}, "--moe-token-dispatcher-type flex: needs a GPU"),
    "expert TP on gloo": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 2}, "--expert-tensor-parallel-size 2: gloo cannot gather"),
    "expert biases": (1, {"disable_bias_linear": False}, "add --disable-bias-linear"),
    "CPU initialization": (2, {"expert_model_parallel_size": 2, "use_cpu_initialization": True}, "--use-cpu-initialization with --expert-model-parallel-size 2: .*same experts"),
    "warmup": (1, {"lr_warmup_iters": 4, "lr_decay_iters": False}, "--lr-warmup-iters 4: not below --train-iters 4"),
    "warmup and decay": (1, {"lr_warmup_iters": 200}, "--lr-warmup-iters 200: not below --lr-decay-iters 100"),
    "no learning rate": (1, {"lr": False}, "--lr: missing"),
    "split of words": (1, {"split": "abc"}, "--split abc: needs the shares"),
    "split without validation": (1, {"split": "100,0,0", "eval_iters": 1}, "--split 100,0,0: no share for validation"),
    "sgd": (1, {"optimizer": "sgd", "use_distributed_optimizer": True}, "--optimizer sgd: the distributed optimizer has only Adam"),
    "muon by layers": (1, {"optimizer": "muon", "use_distributed_optimizer": True}, "gloo cannot gather uneven numbers of weights"),
    "muon by layers, as it was": (1, {"optimizer": "dist_muon"}, "give --optimizer muon without"),
    "sinkhorn": (1, {"moe_router_load_balancing_type": "sinkhorn"}, "sinkhorn: takes no auxiliary loss"),
    "log interval": (1, {"log_interval": 0}, "--log-interval 0: needs 1 or more"),
    "load a file": (1, {"load": __file__}, "--load .*: a file; needs the folder"),
    "vocabulary of the corpus": (1, {"vocab_size": 100}, "--vocab-size 100 without --data-path"),
    "negative": (1, {"num_layers": -4}, "--num-layers -4: needs 1 or more"),
    "zero seed": (1, {"seed": 0}, "--seed 0: needs 1 or more"),
    "no length": (1, {"train_iters": False}, "--train-iters: missing"),
    "no eval interval": (1, {"eval_interval": False}, "--eval-interval: missing"),
    "no layers": (1, {"num_layers": False}, "--num-layers: missing"),
    "save without interval": (1, {"save": "/tmp/x"}, "--save-interval: missing"),
    "router groups": (1, {"moe_router_num_groups": 3, "moe_router_group_topk": 1}, "--moe-router-num-groups 3: does not divide"),
    "Megatron's own assertion": (1, {"overlap_param_gather": True}, "Megatron refuses these flags: --overlap-param-gather only supported"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_flags_are_named(name: str, parse: Callable[..., Namespace]) -> None:
    world_size, changes, message = BAD[name]
    with pytest.raises(ConfigError) as caught:
        parse(world_size, **changes)
    assert re.search(message, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-layer", "3"], r"unknown flag --num-layer; did you mean --num-layers"),
        (["--pipeline-parallel-size", "2"], "did you mean --pipeline-model-parallel-size"),
        (["--zzz"], "unknown flag --zzz; --help lists"),
        (["--hidden-size", "many"], "invalid int value: 'many'"),
        (["stray"], "'stray' is not a flag"),
        (["--moe-token-dispatcher-type", "alltoal"], "invalid choice: 'alltoal'"),
    ],
)
def test_flags_that_do_not_parse_are_named(words: list[str], message: str, parse: Callable[..., Namespace]) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(1, *words)


@pytest.mark.parametrize(
    "flag", ["--run-dir", "--moevement-persist-dir", "--moevement-load", "--moevement-inject-trace"]
)
@pytest.mark.parametrize("empty", ["", " "])
def test_a_path_from_a_variable_that_is_not_set_is_refused(
    flag: str, empty: str, parse: Callable[..., Namespace]
) -> None:
    with pytest.raises(ConfigError, match=rf"{flag} '{empty}': an empty path, .*; give a folder, or leave"):
        parse(1, "--moevement-sparse-ckpt", flag, empty)
    with pytest.raises(ConfigError, match=rf"{flag} '{empty}': an empty path"):
        parse(1, flag, empty)


def test_the_coordinator_refuses_an_empty_run_directory_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["coordinate", "--ranks", "2", "--run-dir", ""])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--run-dir: '' is an empty path; give a folder" in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--port", "70000"], "--port 70000: needs 0 to 65535"),
        (["--host", ""], "--host '': is empty; give the address of this host that the nodes reach"),
        (["--spare-timeout", "nan"], "--spare-timeout nan: needs seconds, 0 or more, or inf"),
    ],
)
def test_what_cannot_be_coordinated_is_said(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["coordinate", "--ranks", "2", *words])
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"moevement: {message}\n"


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
    """Megatron would look for samples among no documents for ever."""
    text, prefix = tmp_path / "text", tmp_path / "tokens"
    text.write_text("a line\n" * 20)
    its = {"data_path": str(prefix), "tokenizer_type": "NullTokenizer", "vocab_size": 257, "eval_iters": 1}
    assert main(["data", "build", str(text), "--output", str(prefix), "--documents", "line"]) == 0
    parse(split="80,10,10", **its)
    with pytest.raises(ConfigError, match=r"--split 98,2,0: of the 20 documents of .*tokens none is left for valid"):
        parse(split="98,2,0", **its)
    parse(split="98,2,0", **its | {"eval_iters": 0})
    assert main(["data", "build", str(text), "--output", str(prefix), "--overwrite"]) == 0
    with pytest.raises(ConfigError, match=r"of the 1 documents of .* none is left for training"):
        parse(split="40,30,30", **its)


def test_workers_without_shared_memory_are_refused(
    parse: Callable[..., Namespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        f_bavail, f_frsize = 3, 4096

    monkeypatch.setattr(machine.os, "statvfs", lambda path: Full)
    parse()  # no workers: nothing goes through it
    with pytest.raises(ConfigError, match=r"--num-workers 2: /dev/shm has 0.0 MB free, .* or --num-workers 0"):
        parse(num_workers=2)
