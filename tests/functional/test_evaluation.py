"""Evaluation changes nothing of what training does after it, with a failure and without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.failure_free import digest_of, failure_free
from tests.functional.jobs import BOTH, SPARSE
from tests.launching import survive
from tests.training import losses, train

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
    """Rank 0 dies when iteration 9 has begun everywhere, and is restored by one that saw no evaluation."""
    flags_ = SPARSE | {"moevement_replicas": 1} | JITTER | {"eval_interval": 8}
    wanted = failure_free(2, **flags_)
    its = {"moevement_recovery": recovery}
    survived = survive(2, 1, tmp_path / "killed", inject=("rank=0,iteration=9,phase=snapshot",), **flags_ | its)
    (failure,) = survived.failures()
    assert failure["recovery"]["until"] == 8
    assert survived.digest == digest_of(wanted)
    survived.check_metrics(14)
