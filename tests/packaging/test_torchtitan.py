"""Jobs of torchtitan's trainer, by the example's script, lose ranks and go on with the same bits.

The pinned environment has no torchtitan. The tests install it, and what it imports, into a folder of their own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from moevement_cli.main import main
from moevement_core.run.run_record import RunRecord
from tests.launching import command, finished, logs
from tests.packaging.environments import overlay
from tests.training import ROOT

pytestmark = pytest.mark.builds

EXAMPLE = ROOT / "examples" / "torchtitan"
WHEELS = (
    "torchtitan==0.3.0", "torchdata", "torch_checkpointing", "spmd_types==0.2.3", "tyro", "typeguard",
    "docstring_parser", "datasets<4.8", "pandas", "pyarrow", "multiprocess<0.70.19", "dill<0.4.1",
)  # fmt: skip
"""Wheels that torchtitan's trainer imports and the pinned environment lacks."""
IN_BACKWARD = """\
    from moevement_core.restart import injection
    from moevement_core.restart.faults import Phase

    def kill_in_backward(module, inputs, output):
        output.register_hook(lambda gradient: injection.at(Phase.BACKWARD))

    model.layers["1"].register_forward_hook(kill_in_backward)
    return TitanBinding(
"""
"""Lines of a script with a point at which a fault can hit a backward pass, between the collectives of two layers."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with torchtitan, for PYTHONPATH."""
    folder = tmp_path_factory.mktemp("torchtitan")
    overlay(folder, *WHEELS)
    return folder


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tokenizer whose tokens are bytes, and with texts to train on."""
    folder = tmp_path_factory.mktemp("assets")
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<s>", "</s>"]
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    (folder / "text").mkdir()
    # A text is shorter than a sequence. After longer ones, a restored loader of torchtitan reads a text in advance, so
    # its state differs from that of another loader with the same batches.
    texts = [" ".join(str(factor * number) for number in range(1, 6)) for factor in range(1, 600)]
    (folder / "text" / "text.json").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return folder


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the example's script with a point for faults in the backward pass."""
    folder = shutil.copytree(EXAMPLE, tmp_path_factory.mktemp("script") / "torchtitan")
    text = (folder / "train.py").read_text(encoding="utf-8")
    before = "    return TitanBinding(\n"
    assert text.count(before) == 1
    (folder / "train.py").write_text(text.replace(before, IN_BACKWARD), encoding="utf-8")
    return folder / "train.py"


class Jobs:
    """Starter of jobs of torchtitan, which share a script, an installation and texts."""

    def __init__(self, script: Path, installed: Path, assets: Path) -> None:
        self._script, self._assets = script, assets
        self._environment = {
            **os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(assets / "cache"),
        }  # fmt: skip
        # Each rank imports torchtitan. With byte code this takes less than half of the time.
        self._environment.pop("PYTHONDONTWRITEBYTECODE", None)

    def run(self, run_dir: Path, *words: str, nproc: int, spares: int, config: str = "qwen3_moe_debug") -> Any:
        """Run a job to its end; return its exit code, its output and its errors."""
        sizes = ["--training.local_batch_size", "2", "--training.seq_len", "32", "--training.steps", "9"]
        data = ["--hf_assets_path", str(self._assets), "--dataloader.dataset_path", str(self._assets / "text")]
        options = ["--trainer", "torch", "--nproc", str(nproc), "--spares", str(spares)]
        names = [str(self._script), "qwen3", config, "--run-dir", str(run_dir)]
        return finished(command(*options, *names, *sizes, *data, *words, env=self._environment), timeout_s=600)

    def record(self, run_dir: Path, *words: str, nproc: int, spares: int) -> RunRecord:
        """Run a job that has to succeed, and return its record."""
        code, out, err = self.run(run_dir, *words, nproc=nproc, spares=spares)
        assert code == 0, f"{out}\n{err}\n{logs(run_dir)}"
        return RunRecord(run_dir)


@pytest.fixture(scope="module")
def jobs(script: Path, installed: Path, assets: Path) -> Jobs:
    return Jobs(script, installed, assets)


def full(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.full)


@pytest.mark.slow("two jobs, whose ranks each import torchtitan")
@pytest.mark.parametrize(
    ("nproc", "experts", "recovery"),
    [
        (2, 2, "replay"), full(2, 1, "replay"), full(2, 1, "redo"), full(2, 2, "redo"), full(4, 1, "replay"),
        full(4, 2, "replay"), full(4, 4, "redo"),
    ],
)  # fmt: skip
def test_lost_shards_come_back(nproc: int, experts: int, recovery: str, jobs: Jobs, tmp_path: Path) -> None:
    """Kill a rank in an update, and another one in a backward pass, when the first replacement has taken over."""
    layout = ("--parallelism.expert_parallel_degree", str(experts), "--moevement-window", "3")
    jobs.record(tmp_path / "free", *layout, nproc=nproc, spares=0)
    faults = [f"rank={nproc - 1},iteration=4,phase=step", "rank=0,iteration=7,phase=backward"]
    words = [word for fault in faults for word in ("--moevement-inject", fault)]
    recover = ("--moevement-recovery", recovery)
    killed = jobs.record(tmp_path / "killed", *layout, *recover, *words, nproc=nproc, spares=2)
    lost = [event["recovery"] for event in killed.events() if event["event"] == "failure"]
    assert len(lost) == 2
    for each in lost:
        assert (each["redone"] if recovery == "redo" else each["replayed"]) > 0
    assert main(["verify", str(tmp_path / "free"), str(tmp_path / "killed")]) == 0


@pytest.mark.full
def test_accumulated_gradients_come_back(jobs: Jobs, tmp_path: Path) -> None:
    """Take three batches in each iteration, and kill a rank between two of its backward passes."""
    words = ("--training.global_batch_size", "12", "--moevement-window", "3")
    jobs.record(tmp_path / "free", *words, nproc=2, spares=0)
    fault = ("--moevement-inject", "rank=1,iteration=5,phase=backward")
    jobs.record(tmp_path / "killed", *words, *fault, nproc=2, spares=1)
    assert main(["verify", str(tmp_path / "free"), str(tmp_path / "killed")]) == 0


@pytest.mark.slow("a job, whose ranks import torchtitan")
@pytest.mark.parametrize(
    ("config", "words", "named"),
    [
        ("qwen3_moe_debug", ("--parallelism.tensor_parallel_degree", "2"), r"\btensor parallelism\b"),
        full("qwen3_moe_debug", ("--parallelism.pipeline_parallel_degree", "2"), r"\bpipeline\b"),
        full("qwen3_moe_debug", ("--checkpoint.enable",), r"--checkpoint\.enable\b"),
        full("no_such_name", (), r"\bno_such_name\b.*\bqwen3_moe_debug\b"),
    ],
)  # fmt: skip
def test_what_does_not_work_is_refused(
    config: str, words: tuple[str, ...], named: str, jobs: Jobs, tmp_path: Path
) -> None:
    code, _, err = jobs.run(tmp_path / "run", *words, nproc=2, spares=0, config=config)
    assert code == 2, err
    assert re.search(named, err.strip().splitlines()[-1]), err
