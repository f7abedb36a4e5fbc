"""Training runs that benchmarks measure: a small MoE on real ranks. The run directory is temporary."""

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
from moevement_core.run.run_record import RunRecord
from moevement_core.util.exit_codes import INTERRUPTED

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
"""Switches of the model, which has 57 M parameters.

Three data-parallel ranks with the distributed optimizer hold 228 MB of full state each.
"""


def samples_of(script: ModuleType, nproc: int, flags: Sequence[str], environment: Mapping[str, str]) -> Any:
    """Train :data:`MODEL`, and return the measurements that ``script`` writes to ``samples.json``.

    Args:
        script: module of :mod:`megatron.moevement.bench`, which runs the training script and measures it.
        nproc: number of ranks.
        flags: flags of the training, in addition to the model's.
        environment: environment variables for ``script``.

    Raises:
        ConfigError: the run failed.
    """
    from megatron.moevement.bench.observed import OUTPUT_ENV

    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {OUTPUT_ENV: folder, **environment}
        launch(nproc, [str(script.__file__), str(SCRIPT), *model_words(flags)], Path(folder, "run"))
        return json.loads(Path(folder, "samples.json").read_text(encoding="utf-8"))


def record_of(
    nproc: int, spares: int, flags: Sequence[str], *, script: Sequence[Path] = (SCRIPT,)
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Train :data:`MODEL` in a job with spares, and return the events and metrics of the run.

    Args:
        nproc: number of ranks.
        spares: number of spares.
        flags: flags of the training, in addition to the model's.
        script: chain of scripts. Each one runs the next one, and the last is the training script.

    Raises:
        ConfigError: the run failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder, "run")
        launch(nproc, [*map(str, script), *model_words(flags)], run_dir, spares)
        record = RunRecord(run_dir)
        return list(record.events()), list(record.metrics())


def model_words(flags: Sequence[str]) -> list[str]:
    """Return the flags of :data:`MODEL`, followed by ``flags``, which override them.

    The model trains in BF16 unless ``flags`` contain ``--fp16``.
    """
    switches = [switch for switch in SWITCHES if switch != "--bf16" or "--fp16" not in flags]
    return [*(word for pair in MODEL.items() for word in map(str, pair)), *switches, *flags]


def launch(nproc: int, argv: list[str], run_dir: Path, spares: int | None = None) -> None:
    """Train on this host until the end of the run.

    Args:
        nproc: number of ranks.
        argv: scripts and flags of the training.
        run_dir: run directory.
        spares: number of spares; None: the first failure ends the run.

    Raises:
        ConfigError: the run failed.
    """
    from megatron.moevement.worker import MEGATRON
    from moevement_core.launching.launch import Launch, launch_on_this_host

    argv = [*argv, "--run-dir", str(run_dir)]
    if code := launch_on_this_host(
        Launch(nproc, argv, trainer=MEGATRON, show_logs=False, fresh_interpreters=False, spares=spares)
    ):
        raise failed(code, run_dir)


def failed(code: int, run_dir: Path) -> ConfigError:
    """Print the last lines of each rank's log, and return the error that the caller raises for a failed run.

    The folder of the run is temporary, so the user cannot read the logs later.

    Args:
        code: exit code of the run, other than 0.
        run_dir: run directory.

    Raises:
        SystemExit: Ctrl-C stopped the run, and the launcher has already reported that.
    """
    if code == INTERRUPTED:
        raise SystemExit(code)
    for path in sorted(run_dir.glob("logs/rank_*")):
        if lines := path.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]:
            print(f"-- {path.name}", *lines, sep="\n", file=sys.stderr)
    return ConfigError(f"the measured run ended with exit code {code}; the last output of its ranks is above")
