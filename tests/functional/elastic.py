"""Elastic jobs, and the fresh jobs that they are compared with.

A fresh job has the elastic job's new size and starts from its dense checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
GONE = ("--respawn-after", "inf")
"""Launcher options with which no process replaces a killed rank."""


def fresh(nproc: int, folder: Path, saved: Path, iteration: int, **overrides: Any) -> Any:
    """Train a job that starts from a dense checkpoint, without any of this project's fault tolerance."""
    plain = {name: value for name, value in (ELASTIC | overrides).items() if not name.startswith("moevement")}
    return train(nproc, folder, **plain | {"load": str(saved), "ckpt_step": iteration})


def resized(survived: Any) -> list[dict[str, Any]]:
    return [event for event in survived.record.events() if event["event"] == "resized"]


def assert_same(survived: Any, other: Any, since: int, drawn_apart: tuple[int, ...] = ()) -> None:
    """Check that losses after ``since`` and the final state are equal bit for bit.

    Args:
        drawn_apart: ranks whose random generators may differ.
    """
    losses = {line["iteration"]: line["loss"] for line in survived.record.metrics() if line["iteration"] > since}
    other_losses = {line["iteration"]: line["loss"] for line in other.metrics()}
    assert losses == other_losses
    ranks, others = (summary["state_digest"]["ranks"] for summary in (survived.record.summary(), other.summary()))
    for rank in range(len(others)):
        ignored = {"rng"} if rank in drawn_apart else set()
        assert {**ranks[rank], **dict.fromkeys(ignored)} == {**others[rank], **dict.fromkeys(ignored)}, f"rank {rank}"


def without(flags: dict[str, Any]) -> dict[str, Any]:
    """Return the flags without those of this project."""
    return {name: value for name, value in flags.items() if not name.startswith("moevement")}
