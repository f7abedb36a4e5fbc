"""Jobs of Megatron-Bridge's trainer lose ranks and go on with the same bits.

The tests need the wheel ``megatron-bridge``, which the pinned environment does not have (docs/bridge.md).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from moevement_cli.main import main
from moevement_core.run.run_record import RunRecord
from tests.training import ROOT

JOB = ROOT / "tests" / "functional" / "bridge_job"
SIZES = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "decoder_sparse_step": 1, "head_dim": 16,
    "hidden_act": "silu", "hidden_size": 64, "initializer_range": 0.02, "intermediate_size": 96,
    "max_position_embeddings": 512, "mlp_only_layers": [], "moe_intermediate_size": 48, "norm_topk_prob": True,
    "num_attention_heads": 4, "num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False, "dtype": "bfloat16", "vocab_size": 256,
}  # fmt: skip
"""Size of the model, in the form of Hugging Face, from which the recipe takes it."""

RECIPE = (
    "qwen3_30b_a3b_pretrain_config", "model.tensor_model_parallel_size=1", "model.pipeline_model_parallel_size=1",
    "model.expert_model_parallel_size=2", "model.sequence_parallel=false", "model.seq_length=32",
    "tokenizer.tokenizer_type=NullTokenizer", "tokenizer.tokenizer_model=null", "tokenizer.hf_tokenizer_kwargs={}",
    "tokenizer.vocab_size=256", "dataset.seq_length=32", "dataset.num_workers=0", "train.train_iters=8",
    "train.global_batch_size=4", "train.micro_batch_size=1", "validation.eval_iters=0", "checkpoint.save=null",
    "checkpoint.load=null", "logger.log_interval=1", "logger.tensorboard_dir=null", "scheduler.lr_warmup_iters=1",
)  # fmt: skip
"""Name of a recipe, and settings that make its job small."""

needs_wheel = pytest.mark.skipif(find_spec("megatron.bridge") is None, reason="megatron-bridge is not installed")


def run(
    folder: Path, name: str, *words: str, faults: tuple[str, ...] = (), script: Sequence[str] | None = None
) -> RunRecord:
    """Run a job of two ranks and a spare, and return its record."""
    model = folder / "Qwen" / "Qwen3-30B-A3B"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(SIZES))
    options = ["--trainer", "bridge", "--nproc", "2", "--spares", "1", "--ranks-per-node", "1"]
    argv = [str(JOB / "train.py"), "--work", str(folder)] if script is None else list(script)
    arguments = ["--moevement-sparse-ckpt", "--run-dir", str(folder / name), *words]
    arguments += [word for fault in faults for word in ("--moevement-inject", fault)]
    environment = {
        **os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(JOB), str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    command = [sys.executable, "-m", "moevement_cli.main", "launch", *options, *argv, *arguments]
    ended = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return RunRecord(folder / name)


def is_the_same(a: RunRecord, b: RunRecord) -> bool:
    return main(["verify", str(a.folder), str(b.folder)]) == 0


@needs_wheel
@pytest.mark.slow("two jobs, and Bridge's imports")
def test_ranks_are_killed_around_saves_and_nothing_is_different(tmp_path: Path) -> None:
    """Kill a rank in a dense save and another in a forward pass; callbacks see every iteration."""
    free = run(tmp_path, "free", "--save", str(tmp_path / "saves_free"))
    faults = ("rank=1,iteration=8,phase=save", "rank=0,iteration=10,phase=forward")
    killed = run(tmp_path, "killed", "--save", str(tmp_path / "saves"), faults=faults)
    assert is_the_same(free, killed)
    assert len([event for event in killed.events() if event["event"] == "recovery"]) == 2
    assert [line["iteration"] for line in killed.metrics()] == list(range(1, 13))
    for iteration in (4, 8, 12):
        assert (tmp_path / "saves" / f"iter_{iteration:07d}" / ".metadata").exists()


@needs_wheel
@pytest.mark.full
@pytest.mark.parametrize("recovery", ["replay", "redo"])
def test_a_stage_recovers_alone(recovery: str, tmp_path: Path) -> None:
    layout = ("--pipeline", "2", "--experts", "1", "--moevement-recovery", recovery)
    free = run(tmp_path, "free", *layout)
    killed = run(tmp_path, "killed", *layout, faults=("rank=1,iteration=6,phase=backward",))
    assert is_the_same(free, killed)
    (recovered,) = [event for event in killed.events() if event["event"] == "recovery"]
    assert recovered["replayed_by_stage"]["0"] == 0


@needs_wheel
@pytest.mark.full
def test_a_resumed_job_recovers(tmp_path: Path) -> None:
    """Resume from a dense checkpoint of Bridge, and kill a rank afterwards."""
    free = run(tmp_path, "free", "--save", str(tmp_path / "saves_free"))
    saves = ("--save", str(tmp_path / "saves"))
    run(tmp_path, "first", *saves, "--exit-after", "8")
    resumed = run(tmp_path, "resumed", *saves, faults=("rank=0,iteration=10,phase=forward",))
    assert resumed.summary()["state_digest"] == free.summary()["state_digest"]


@needs_wheel
@pytest.mark.slow("two jobs, and Bridge's imports")
def test_a_recipe_by_name_recovers(tmp_path: Path) -> None:
    """Train by the name of a recipe, with settings on the command line and no script; kill a rank."""
    free = run(tmp_path, "free", script=RECIPE)
    killed = run(tmp_path, "killed", script=RECIPE, faults=("rank=1,iteration=5,phase=backward",))
    assert is_the_same(free, killed)
    assert [line["iteration"] for line in killed.metrics()] == list(range(1, 9))


@needs_wheel
@pytest.mark.parametrize(
    ("name", "near"), [("qwen3_30b_a3b_pretrain", RECIPE[0]), pytest.param("zzz", "SCRIPT", marks=pytest.mark.full)]
)
def test_an_unknown_recipe_is_refused_with_the_names_like_it(
    name: str, near: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["launch", "--trainer", "bridge", "--nproc", "2", name])
    err = capfd.readouterr().err
    assert near in err
    assert err.count("\n") == 1


@pytest.mark.skipif(find_spec("megatron.bridge") is not None, reason="megatron-bridge is installed")
@pytest.mark.parametrize("script", [str(JOB / "train.py"), RECIPE[0]])
def test_without_the_wheel_the_launcher_refuses(script: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["launch", "--trainer", "bridge", "--nproc", "2", script])
    assert "megatron-bridge" in capfd.readouterr().err
