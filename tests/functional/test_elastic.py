"""Elastic jobs: ranks are killed for good and the job goes on with fewer; processes come back and it grows again.

What a job of another size does is compared with a fresh job of that size that starts from the same state: a dense
checkpoint that the elastic job has saved at the iteration from which it went on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.launching import survive
from tests.training import train

ELASTIC: dict[str, Any] = {
    "moevement_sparse_ckpt": True,
    "moevement_elastic": True,
    "moevement_join_wait": 1000,
    "moevement_window": 3,
    "moevement_replicas_on_same_node": True,
    "global_batch_size": 24,
    "train_iters": 9,
}
OURS = tuple(name for name in ELASTIC if name.startswith("moevement"))


def fresh(nproc: int, folder: Path, saved: Path, iteration: int, **overrides: Any) -> Any:
    """A job without any of this project's fault tolerance that starts from a dense checkpoint."""
    plain = {name: value for name, value in (ELASTIC | overrides).items() if not name.startswith("moevement")}
    return train(nproc, folder, **plain | {"load": str(saved), "ckpt_step": iteration})


def resized(survived: Any) -> list[dict[str, Any]]:
    return [event for event in survived.record.events() if event["event"] == "resized"]


def assert_same(survived: Any, other: Any, since: int) -> None:
    """Losses after ``since`` and the final state are equal, bit for bit."""
    mine = {line["iteration"]: line["loss"] for line in survived.record.metrics() if line["iteration"] > since}
    its = {line["iteration"]: line["loss"] for line in other.metrics()}
    assert mine == its
    assert survived.record.summary()["state_digest"] == other.summary()["state_digest"]


LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "DP4": (4, 3, {}),
    "DP3xdropout": (3, 2, {"hidden_dropout": 0.1, "attention_dropout": 0.1, "bf16": True}),
    "EP2xDP2": (4, 2, {"expert_model_parallel_size": 2, "bf16": True}),
    "PP2xDP2": (4, 2, {"pipeline_model_parallel_size": 2, "fp16": True, "initial_loss_scale": 2**10}),
    "TP2xDP2": (4, 2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("rank", "phase"), [(0, "forward"), (-1, "step")], ids=["first-forward", "last-step"]
)
def test_a_job_goes_on_with_fewer_ranks_as_a_fresh_one_would(
    layout: str, rank: int, phase: str, tmp_path: Path
) -> None:
    nproc, left, its = LAYOUTS[layout]
    saved = tmp_path / "saved"
    survived = survive(
        nproc, 0, tmp_path / "elastic",
        inject=(f"rank={rank % nproc},iteration=6,phase={phase}",),
        **ELASTIC | its | {"save": str(saved), "save_interval": 1},
    )  # fmt: skip
    (event,) = resized(survived)
    assert (event["world_before"], event["world_size"]) == (nproc, left)
    assert event["digests_equal"]
    assert event["iteration"] == (6 if phase == "step" else 5)
    assert_same(survived, fresh(left, tmp_path / "fresh", saved, event["iteration"], **its), event["iteration"])
