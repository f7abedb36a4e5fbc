"""A training on one rank whose whole device memory is wiped in the middle and brought back from snapshots: each byte is
compared with what was lost, and the end with that of a run that nothing happened to. Then the same model with and without
snapshots, in turns.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "pretrain_moe" / "pretrain_gpt.py"
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
"""Where there is no GPU."""
SWITCHES = (
    "--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights", "--bf16",
    "--use-distributed-optimizer", "--transformer-impl", "local", "--attention-backend", "unfused",
    "--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion", "--no-bias-gelu-fusion",
    "--no-bias-swiglu-fusion", "--no-bias-dropout-fusion", "--no-rope-fusion", "--no-persist-layer-norm",
)  # fmt: skip
ITERATIONS, WIPED_AT = 30, 17
SNAPSHOTS = ("--moevement-sparse-ckpt", "--moevement-replicas", "0", "--moevement-window", "4")


def measure() -> dict[str, Any]:
    """Run, compare, time."""
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: Path(folder, name) for name in ("plain", "wiped", "free", "plain again", "free again")}
        for name, path in runs.items():
            _train(path, () if "plain" in name else SNAPSHOTS, wiped_at=WIPED_AT if name == "wiped" else None)
        command = [str(Path(sys.executable).with_name("moevement")), "verify", str(runs["free"]), str(runs["wiped"])]
        told = subprocess.run(command, capture_output=True, text=True, check=False)
        seconds = {name: _median_s(path) for name, path in runs.items()}
        recovery = _recovery(runs["wiped"])
    rows = [
        ["wiped and recovered against failure-free", (told.stdout + told.stderr).strip().splitlines()[-1]],
        ["recovery", recovery],
        *([f"iteration, {name}", f"{1e3 * value:.1f} ms"] for name, value in seconds.items()),
        [
            "with snapshots over without",
            f"{(seconds['free'] + seconds['free again']) / (seconds['plain'] + seconds['plain again']):.3f}",
        ],
    ]
    return {"rows": rows, "is_equal": told.returncode == 0}


def _train(run_dir: Path, words: tuple[str, ...], wiped_at: int | None) -> None:
    model = MODEL if torch.cuda.is_available() else MODEL | SMALL
    flags = [word for name, value in model.items() for word in (f"--{name}", str(value))]
    wipe = [] if wiped_at is None else ["--moevement-wipe-at", str(wiped_at)]
    command = [
        str(Path(sys.executable).with_name("moevement")), "launch", "--nproc", "1", str(SCRIPT), *flags, *SWITCHES,
        "--train-iters", str(ITERATIONS), "--run-dir", str(run_dir), *words, *wipe,
    ]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise RuntimeError((ended.stdout + ended.stderr)[-3000:])


def _median_s(run_dir: Path) -> float:
    """Of the later half, without what a recovery left out."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    times = sorted(line["iteration_s"] for line in lines[ITERATIONS // 2 :])
    return float(times[len(times) // 2])


def _recovery(run_dir: Path) -> str:
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    found = [event for event in events if event["event"] == "recovery"]
    if not found:
        return "no recovery"
    its = found[-1]
    seconds = {name: value for name, value in its.items() if name.endswith("_s") and isinstance(value, float)}
    return ", ".join(f"{name} {value:.2f}" for name, value in seconds.items()) or json.dumps(its)[:200]
