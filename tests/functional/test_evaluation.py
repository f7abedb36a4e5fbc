"""An evaluation changes nothing in the training after it, with a failure or without."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from moevement_core.run.run_record import RunRecord
from tests.failure_free import digest_of, failure_free
from tests.functional.jobs import BOTH, SPARSE
from tests.launching import finished, launch, logs, survive
from tests.training import SCRIPT, flags, losses, train

JITTER: dict[str, Any] = {
    "pipeline_model_parallel_size": 2, "moe_input_jitter_eps": 0.1, "train_iters": 14, "eval_iters": 1,
}  # fmt: skip


def test_an_evaluation_that_draws_does_not_move_what_training_draws(tmp_path: Path) -> None:
    often = train(2, tmp_path / "often", **JITTER, eval_interval=3)
    once = train(2, tmp_path / "once", **JITTER, eval_interval=1000)
    assert losses(often) == losses(once)
    assert len([event for event in often.events() if event["event"] == "evaluation"]) > 4


@BOTH
def test_a_rank_that_died_after_an_evaluation_draws_what_it_would_have_drawn(recovery: str, tmp_path: Path) -> None:
    """Kill rank 0 after all ranks began iteration 9; a spare that saw no evaluation replaces it."""
    flags_ = SPARSE | {"moevement_replicas": 1} | JITTER | {"eval_interval": 8}
    wanted = failure_free(2, **flags_)
    overrides = {"moevement_recovery": recovery}
    survived = survive(2, 1, tmp_path / "killed", inject=("rank=0,iteration=9,phase=snapshot",), **flags_ | overrides)
    (failure,) = survived.failures()
    assert failure["recovery"]["until"] == 8
    assert survived.digest == digest_of(wanted)
    survived.check_metrics(14)


@pytest.mark.builds
@pytest.mark.slow("evaluations long enough to be asked in")
def test_a_job_that_is_asked_to_end_leaves_its_evaluation(tmp_path: Path) -> None:
    """Send SIGTERM during an evaluation: the job leaves the evaluation within one evaluation iteration.

    Dropout is on again in the training iterations that ranks need to agree on the end.
    """
    flags_ = SPARSE | {
        "moevement_replicas": 1, "pipeline_model_parallel_size": 2, "num_layers": 2, "hidden_dropout": 0.1,
        "train_iters": 8, "eval_interval": 4, "eval_iters": 60,
    }  # fmt: skip
    windows: dict[str, Any] = {
        "moevement_persist_dir": str(tmp_path / "windows"),
        "moevement_load": str(tmp_path / "windows"),
    }
    run_dir = tmp_path / "run"
    words = flags(**flags_, **windows)
    job = launch("--nproc", "2", "--spares", "0", str(SCRIPT), *words, "--run-dir", str(run_dir))
    record = RunRecord(run_dir)
    while (record.newest_metric() or {"iteration": 0})["iteration"] < 4:
        assert job.poll() is None, finished(job)
        time.sleep(0.01)
    time.sleep(0.2)  # the evaluation has begun
    job.send_signal(signal.SIGTERM)
    code, out, err = finished(job)
    assert (code, err) == (0, ""), f"{out}\n{logs(run_dir)}"
    assert 4 <= record.summary()["iterations"] <= 7
    assert not [event for event in record.events() if event["event"] == "evaluation"]
    survived = survive(2, 0, run_dir, **flags_, **windows)
    survived.check_metrics(8)
    assert survived.digest == digest_of(failure_free(2, **flags_)), "validation samples are consumed as ever, too"
