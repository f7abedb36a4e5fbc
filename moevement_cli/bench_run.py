"""The training run that a benchmark measures: one small MoE, on real ranks, in a folder that is gone afterwards."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from moevement_cli.examples import EXAMPLES
from moevement_core.errors import ConfigError
from moevement_core.exit_codes import INTERRUPTED
from moevement_core.run_record import RunRecord

SCRIPT = EXAMPLES / "pretrain_moe" / "pretrain_gpt.py"
MODEL = {
    "--num-layers": 4, "--hidden-size": 512, "--num-attention-heads": 8, "--ffn-hidden-size": 1024,
    "--num-experts": 8, "--moe-router-topk": 2, "--moe-ffn-hidden-size": 1024, "--seq-length": 128,
    "--max-position-embeddings": 128, "--position-embedding-type": "rope", "--normalization": "RMSNorm",
    "--moe-token-dispatcher-type": "alltoall", "--moe-router-load-balancing-type": "aux_loss",
    "--moe-aux-loss-coeff": 0.01, "--micro-batch-size": 1, "--lr": 1e-4, "--lr-decay-style": "constant",
    "--eval-iters": 0, "--eval-interval": 100000, "--log-interval": 1, "--seed": 1234, "--num-workers": 0,
}  # fmt: skip
LAST_LINES = 15
SWITCHES = ("--swiglu", "--disable-bias-linear", "--bf16")
"""57 M parameters; with the distributed optimizer over three data-parallel ranks 228 MB of full state a rank."""


def samples_of(script: ModuleType, nproc: int, flags: Sequence[str], environment: Mapping[str, str]) -> Any:
    """Run :data:`MODEL` under ``script``, which observes it and leaves ``samples.json``; returns what that holds.

    Args:
        script: of :mod:`megatron.moevement.bench`.
        nproc: ranks.
        flags: of the training, beyond the model's.
        environment: for ``script``.

    Raises:
        ConfigError: the run failed.
    """
    from megatron.moevement.bench.observed import OUTPUT_ENV

    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {OUTPUT_ENV: folder, **environment}
        _launch(nproc, [str(script.__file__), str(SCRIPT), *model_words(flags)], Path(folder, "run"), None)
        return json.loads(Path(folder, "samples.json").read_text(encoding="utf-8"))


def record_of(nproc: int, spares: int, flags: Sequence[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Run :data:`MODEL` with spares; returns the events that it leaves, and the metrics.

    Raises:
        ConfigError: the run failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder, "run")
        _launch(nproc, [str(SCRIPT), *model_words(flags)], run_dir, spares)
        record = RunRecord(run_dir)
        return list(record.events()), list(record.metrics())


def model_words(flags: Sequence[str]) -> list[str]:
    """Megatron's flags of :data:`MODEL`, in BF16 unless ``flags`` say FP16, and ``flags``, which win."""
    switches = [one for one in SWITCHES if one != "--bf16" or "--fp16" not in flags]
    return [*(word for pair in MODEL.items() for word in map(str, pair)), *switches, *flags]


def _launch(nproc: int, argv: list[str], run_dir: Path, spares: int | None) -> None:
    from megatron.moevement.worker import MEGATRON
    from moevement_core.launching import launch

    argv = [*argv, "--run-dir", str(run_dir)]
    code = launch.launch_on_this_host(launch.Launch(nproc, argv, MEGATRON, False, False, spares))
    if code:
        raise failed(code, run_dir)


def failed(code: int, run_dir: Path) -> ConfigError:
    """The error of a measured run, whose folder will be gone: what its ranks said last is printed.

    Raises:
        SystemExit: it was stopped by Ctrl-C, and has said so.
    """
    if code == INTERRUPTED:
        raise SystemExit(code)
    for path in sorted(run_dir.glob("logs/rank_*")):
        if lines := path.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]:
            print(f"-- {path.name}", *lines, sep="\n", file=sys.stderr)
    return ConfigError(f"the measured run ended with {code}; what its ranks said last stands above")
