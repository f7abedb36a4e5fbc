"""``pretrain`` is entered again after a failure, though Megatron keeps state from the first time."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.launching import survive
from tests.training import SCRIPT

SPARSE: dict[str, Any] = {
    "moevement_sparse_ckpt": True, "moevement_window": 2, "moevement_replicas": 1,
    "moevement_replicas_on_same_node": True, "train_iters": 8, "fp16": True, "initial_loss_scale": 2**10,
}  # fmt: skip


@pytest.mark.full
def test_timers_that_were_started_and_a_script_that_says_nothing_of_its_start(tmp_path: Path) -> None:
    """Kill rank 1 before its check of gradients. Rank 0 waits in the check, so its timer of the check runs.

    The script sets no startup timestamps. With them, ranks would make one more reduction, and the spare would not.
    """
    script = tmp_path / "dying.py"
    text = SCRIPT.read_text(encoding="utf-8").replace("    set_startup_timestamps(", "    dict(")
    assert "    dict(program_start" in text
    (tmp_path / "quiet.py").write_text(text, encoding="utf-8")
    script.write_text(DYING.format(script=str(SCRIPT), quiet=str(tmp_path / "quiet.py"), died=str(tmp_path / "died")))
    job = SPARSE | {"timing_log_level": 2}
    wanted = survive(2, 0, tmp_path / "wanted", **job)
    survived = survive(2, 1, tmp_path / "run", script=script, **job)
    (failure,) = survived.failures()
    assert re.match(r"rank 1\b.*\bsignal 9\b", failure["failures"][0])
    assert failure["earlier"] == [], "nobody hangs in the recovery from it"
    survived.check_metrics(8)
    assert survived.digest == wanted.digest


DYING = """
import os
import signal
import sys
import time
from pathlib import Path

import torch

from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer

DIED = Path({died!r})
original = MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan
calls = 0


def dying(self):
    global calls
    calls += 1
    if calls == 5 and torch.distributed.get_rank() == 1 and not DIED.exists():
        DIED.touch()
        time.sleep(0.3)  # the other one waits for it
        os.kill(os.getpid(), signal.SIGKILL)
    return original(self)


MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan = dying
sys.argv[0] = {script!r}
exec(compile(Path({quiet!r}).read_text(), {script!r}, "exec"), globals())
"""
