"""``moevement profile`` measures real ranks, and ``moevement simulate`` takes its result."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from moevement_cli.main import main
from moevement_cli.profile import FEWEST, FEWEST_SAVING
from moevement_core.planning.profile import Profile
from tests.training import ROOT, SCRIPT

FLAGS = {
    "num-layers": 4, "hidden-size": 64, "num-attention-heads": 4, "seq-length": 32, "num-experts": 4,
    "moe-router-topk": 2, "moe-ffn-hidden-size": 48, "normalization": "RMSNorm", "swiglu": True,
    "untie-embeddings-and-output-weights": True, "disable-bias-linear": True, "max-position-embeddings": 32,
    "position-embedding-type": "rope", "pipeline-model-parallel-size": 2, "use-distributed-optimizer": True,
    "micro-batch-size": 1, "global-batch-size": 8, "lr": 0.001, "bf16": True, "moevement-sparse-ckpt": True,
    "moe-token-dispatcher-type": "alltoall", "eval-interval": 1000,
}  # fmt: skip


def profile(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "moevement_cli.main", "profile", "--nproc", "2", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=250)


@pytest.mark.builds
def test_a_run_is_measured_and_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, output = tmp_path / "flags.yaml", tmp_path / "profile.yaml"
    config.write_text(yaml.safe_dump(FLAGS))
    words = ["--iterations", "8", "--saving-iterations", "24", "--micro-batch-sizes", "2", "--output", str(output)]
    done = profile(*words, str(SCRIPT), "--config", str(config))
    assert done.returncode == 0, done.stderr
    loaded = Profile.load(output)
    (size,) = loaded.sizes
    printed = " ".join(done.stdout.split())
    measured_s = re.escape(f"{size.iteration_s:.4g}")
    assert re.search(rf"\b{measured_s} s\b.*\d s\b.*\bsimulation\b", printed), printed
    assert (loaded.ranks, loaded.pipeline, size.micro_batches, size.tokens, loaded.backend) == (2, 2, 4, 64, "gloo")
    assert [stage.layers for stage in size.stages] == [2, 2]
    for stage in size.stages:
        assert 0 < stage.forward_s < size.iteration_s
        assert 0 < stage.backward_s < size.iteration_s
        assert stage.layer_output_bytes == 64 * 64 * 2
        assert stage.layer_activation_bytes > stage.layer_output_bytes
    assert {timing.collective for timing in loaded.collectives} == {
        "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send",
    }  # fmt: skip
    assert loaded.contention is not None
    assert loaded.contention >= 0
    assert min(loaded.d2h_bytes_per_s, loaded.network_bytes_per_s, loaded.storage_bytes_per_s) > 0
    job = {
        "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 259, "seq_length": 32,
        "num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 48, "global_batch_size": 8,
        "micro_batch_size": 2,
    }  # fmt: skip
    whole = {"job": job, "parallel": {"ranks": 2, "pipeline": 2}, "profile": "profile.yaml"}
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text(yaml.safe_dump({**whole, "checkpointing": {"replicas": 1}}))
    assert main(["simulate", str(scenario), "--mtbf", "600", "--strategy", "moevement", "--seeds", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])["results"][0]
    assert result["iteration_s"] == pytest.approx(size.iteration_s)


def test_too_few_iterations_with_checkpoints_are_refused() -> None:
    done = profile("--saving-iterations", "3", str(SCRIPT))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert re.search(rf"--saving-iterations 3\b.*\b{FEWEST_SAVING}\b", done.stderr), done.stderr


def test_too_few_iterations_are_refused() -> None:
    done = profile("--iterations", "3", str(SCRIPT))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert re.search(rf"--iterations 3\b.*\b{FEWEST}\b", done.stderr), done.stderr


@pytest.mark.full
def test_why_a_run_failed_is_said(tmp_path: Path) -> None:
    config = tmp_path / "flags.yaml"
    config.write_text(yaml.safe_dump({**FLAGS, "eval-interval": None}))
    done = profile(str(SCRIPT), "--config", str(config))
    assert done.returncode == 2
    *before, last = done.stderr.splitlines()
    assert any(re.match(r"moevement: --eval-interval\b", line) for line in before), "its output outlives its folder"
    assert re.match(r"moevement: .*\brun\b.*\b2\b", last), last
