"""Helpers that train a tiny model with the example script on real ranks, for functional tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.moevement import worker
from moevement_core.run.run_record import RunRecord
from tests.harness import Outcome, run_ranks
from tests.limits import HANGS_S

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "pretrain_moe" / "pretrain_gpt.py"

TINY: dict[str, Any] = {
    "num-layers": 4,
    "hidden-size": 32,
    "num-attention-heads": 4,
    "ffn-hidden-size": 64,
    "seq-length": 32,
    "max-position-embeddings": 32,
    "position-embedding-type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable-bias-linear": True,
    "untie-embeddings-and-output-weights": True,
    "attention-dropout": 0.0,
    "hidden-dropout": 0.0,
    "num-experts": 4,
    "moe-router-topk": 2,
    "moe-ffn-hidden-size": 48,
    "moe-token-dispatcher-type": "alltoall",
    "moe-aux-loss-coeff": 1e-2,
    "moe-router-load-balancing-type": "aux_loss",
    "expert-tensor-parallel-size": 1,
    "micro-batch-size": 2,
    "global-batch-size": 8,
    "train-iters": 4,
    "lr": 5e-3,
    "lr-decay-style": "constant",
    "lr-decay-iters": 100,
    "weight-decay": 0.1,
    "seed": 1234,
    "eval-iters": 0,
    "eval-interval": 1000,
    "log-interval": 1,
    "make-vocab-size-divisible-by": 16,
    "num-workers": 0,
}
"""Flags of a GPT-MoE of four layers, small enough that a run takes seconds."""


def flags(**overrides: Any) -> list[str]:
    """Return :data:`TINY` with ``overrides`` (``_`` for ``-``; False leaves a flag out), as command-line words."""
    merged = TINY | {key.replace("_", "-"): value for key, value in overrides.items()}
    words: list[str] = []
    for key, value in merged.items():
        if value is True:
            words.append(f"--{key}")
        elif value is not False and value is not None:
            words += [f"--{key}", *([str(item) for item in value] if isinstance(value, list) else [str(value)])]
    return words


def train(
    nproc: int, run_dir: Path | None, *, check: bool = True, timeout_s: float = HANGS_S, **overrides: Any
) -> RunRecord:
    """Train on ``nproc`` ranks and return the record of the run."""
    outcomes(nproc, run_dir, check=check, timeout_s=timeout_s, **overrides)
    return RunRecord(run_dir or Path())


def outcomes(
    nproc: int, run_dir: Path | None, *, check: bool = True, timeout_s: float = HANGS_S, **overrides: Any
) -> list[Outcome]:
    """Train as :func:`train` does, and return the outcome of each rank."""
    argv = [str(SCRIPT), *flags(**overrides), *(["--run-dir", str(run_dir)] if run_dir else [])]
    return run_ranks(worker.run_rank, nproc, argv, timeout_s=timeout_s, init_process_group=False, check=check)


def losses(record: RunRecord) -> dict[int, float]:
    """Return the training loss of each iteration of a run."""
    return {line["iteration"]: line["loss"] for line in record.metrics()}


def start_from(folder: Path, **overrides: Any) -> dict[str, Any]:
    """Save a dense checkpoint of one rank and return the flags with which any layout starts from its weights."""
    train(1, None, train_iters=1, save=str(folder), save_interval=1, **overrides)
    return {"load": str(folder), "no_load_optim": True, "no_load_rng": True, "finetune": True}
