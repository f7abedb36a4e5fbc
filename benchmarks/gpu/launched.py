"""Jobs that checks launch with the ``moevement`` command, and their records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.gpu import shared
from benchmarks.gpu.processes import ROOT, Process
from moevement_core.run.run_record import RunRecord
from moevement_core.run.verify import compare

MEGATRON = ROOT / "examples" / "pretrain_moe" / "pretrain_gpt.py"
MEGATRON_SHARED = Path(__file__).parent / "scripts" / "pretrain_shared.py"
PLAIN = ROOT / "examples" / "plain_torch" / "train.py"
JOB_S = 300
"""Limit of one job in seconds. The check that launches the job usually has a lower limit."""
MODEL = {
    "num-layers": 4, "hidden-size": 1024, "num-attention-heads": 16, "ffn-hidden-size": 2048, "num-experts": 8,
    "moe-router-topk": 2, "moe-ffn-hidden-size": 2048, "seq-length": 512, "max-position-embeddings": 512,
    "position-embedding-type": "rope", "normalization": "RMSNorm", "micro-batch-size": 4, "global-batch-size": 16,
    "lr": 1e-3, "lr-decay-style": "constant", "lr-decay-iters": 100, "seed": 1234, "eval-iters": 0,
    "eval-interval": 1000, "log-interval": 1, "attention-dropout": 0.0, "hidden-dropout": 0.0,
    "make-vocab-size-divisible-by": 64, "num-workers": 0, "moe-token-dispatcher-type": "alltoall",
}  # fmt: skip
SMALL = {
    "num-layers": 2, "hidden-size": 32, "num-attention-heads": 4, "ffn-hidden-size": 64, "num-experts": 4,
    "moe-ffn-hidden-size": 48, "seq-length": 32, "max-position-embeddings": 32, "micro-batch-size": 2,
    "global-batch-size": 4,
}  # fmt: skip
"""Sizes of the model on machines without a GPU."""
MIDDLE = {
    "hidden-size": 256, "num-attention-heads": 8, "ffn-hidden-size": 512, "moe-ffn-hidden-size": 512,
    "seq-length": 256, "max-position-embeddings": 256, "micro-batch-size": 2,
}  # fmt: skip
"""Sizes of the model for ranks that share one GPU. They are moderate because gradients pass through sockets."""
LOCAL = ("--transformer-impl", "local", "--attention-backend", "unfused", "--no-persist-layer-norm")
"""Flags for Megatron's own layers, which need no Transformer Engine."""
SWITCHES = (
    "--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights", "--bf16",
    "--use-distributed-optimizer", "--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion",
    "--no-bias-gelu-fusion", "--no-bias-swiglu-fusion", "--no-bias-dropout-fusion", "--no-rope-fusion",
)  # fmt: skip


class JobFailed(RuntimeError):
    """Exception for a job that failed unexpectedly."""


def launch(
    words: Sequence[str], environment: Mapping[str, str] | None = None, limit_s: float = JOB_S
) -> tuple[int, str]:
    """Run ``moevement launch`` with these arguments, and return its exit code and the end of its output.

    Raises:
        TimeoutError: the job exceeds ``limit_s``; the message has the end of its output.
    """
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # Else torch warns at each poll of the store.
    with Process(_launch, {"words": list(words)}, {**quiet, **(environment or {})}) as process:
        try:
            code = process.result(limit_s) if process.wait(limit_s) == 0 else process.wait(0)
        except TimeoutError as error:
            raise TimeoutError(f"{error}; the output ends with: {process.tail(40)}") from None
        return int(code), process.tail(40)


def _launch(words: list[str]) -> int:
    from moevement_cli.main import main

    try:
        return main(["launch", *words])
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)


def pretrain(
    run_dir: Path,
    iterations: int,
    *words: str,
    nproc: int = 1,
    spares: int | None = None,
    layers: Sequence[str] = LOCAL,
    environment: Mapping[str, str] | None = None,
) -> RunRecord:
    """Train with Megatron, and return the record of the run. If the machine has one GPU, all ranks share it.

    Raises:
        JobFailed: the exit code is not 0.
    """
    shares = nproc > 1 and shared.is_shared()
    model = MODEL if torch.cuda.is_available() else MODEL | SMALL
    if shares:
        model |= MIDDLE
    script = MEGATRON_SHARED if shares else MEGATRON
    flags = [word for name, value in model.items() for word in (f"--{name}", str(value))]
    return _job(
        ["--nproc", str(nproc), *([] if spares is None else ["--spares", str(spares)]), str(script), *flags,
         *SWITCHES, *layers, "--train-iters", str(iterations), "--run-dir", str(run_dir), *words],
        run_dir, environment,
    )  # fmt: skip


def train_plain(run_dir: Path, iterations: int, *words: str, nproc: int, spares: int) -> RunRecord:
    """Train with the trainer in plain torch, which needs no GPU, and return the record of the run.

    Raises:
        JobFailed: the exit code is not 0.
    """
    return _job(
        ["--trainer", "torch", "--nproc", str(nproc), "--spares", str(spares), str(PLAIN),
         "--iterations", str(iterations), "--run-dir", str(run_dir), *words],
        run_dir, {},
    )  # fmt: skip


def _job(words: list[str], run_dir: Path, environment: Mapping[str, str] | None) -> RunRecord:
    code, output = launch(words, environment)
    print(f"$ moevement launch {' '.join(words)}\n{output}", flush=True)
    if code != 0:
        raise JobFailed(f"exit code {code} of the job in {run_dir.name}: {output[-2000:]}")
    return RunRecord(run_dir)


def is_equal(first: RunRecord, other: RunRecord) -> bool:
    """Return True if two runs have the same bits, as ``moevement verify`` compares them."""
    return compare(first, other).first_difference is None


def events(record: RunRecord, kind: str) -> list[dict[str, object]]:
    """Return the events of a kind, in the order of the record."""
    return [event for event in record.events() if event["event"] == kind]
