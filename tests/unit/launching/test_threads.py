"""A rank has the same number of threads under launch and under Slurm, because its sums depend on the number."""

from __future__ import annotations

import os

import pytest

from moevement_core.launching.launch import threads


@pytest.mark.parametrize(
    ("cores", "of_task", "ranks", "wanted"), [(2, None, 4, "1"), (8, None, 4, "2"), (8, "1", 1, "1"), (8, "4", 2, "2")]
)
def test_each_rank_has_its_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, of_task: str | None, ranks: int, wanted: str
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    if of_task is not None:
        monkeypatch.setenv("SLURM_CPUS_PER_TASK", of_task)
    assert threads(ranks) == wanted
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads(ranks) == "3"
