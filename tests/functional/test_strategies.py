"""Systems that MoEvement is compared with survive the same kills; exact ones end with equal bits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from moevement_cli.main import main
from tests.failure_free import digest_of, failure_free, failure_free_digest
from tests.functional.jobs import EP2XDP2, LAYOUTS, PHASES, SPARSE, among
from tests.launching import Survived, survive
from tests.training import train


def as_strategy(name: str, tmp_path: Path) -> dict[str, Any]:
    """Return the flags of a strategy that saves everything, every four iterations if it has an interval."""
    flags_: dict[str, Any] = {"moevement_window": False, "moevement_strategy": name, "moevement_dense_interval": 4}
    if name in ("moc", "moetion"):
        flags_["moevement_snapshot_experts"] = 4  # all four
    if name == "moetion":
        flags_["moevement_dense_interval"] = False
    if name == "checkfreq":
        flags_ |= {"moevement_persist_dir": str(tmp_path / "windows"), "moevement_replicas": False}
    return flags_


def assert_all_roll_back(survived: Survived, nproc: int) -> None:
    for failure in survived.failures():
        if failure["recovery"] is not None:
            assert failure["recovery"]["ranks"] == list(range(nproc)), failure["scope"]


EP2: dict[str, Any] = {"expert_model_parallel_size": 2, "use_distributed_optimizer": True, "bf16": True}
TWO = {"gemini": LAYOUTS["PP2"][1], "checkfreq": EP2}
"""Layouts of two ranks, by strategy."""
FOUR = {"PP2xEP2": LAYOUTS["PP2xEP2"][1], "EP2xDP2": EP2XDP2}
CASES = [
    pytest.param("checkfreq", 2, TWO["checkfreq"], id="checkfreq-2"),
    pytest.param("gemini", 2, TWO["gemini"], marks=pytest.mark.full, id="gemini-2"),
    *(
        pytest.param(name, 4, layout, marks=pytest.mark.full, id=f"{name}-{layout_name}")
        for name in ("gemini", "checkfreq", "moc", "moetion")
        for layout_name, layout in FOUR.items()
    ),
]


@pytest.mark.parametrize(("name", "nproc", "layout"), CASES)
@pytest.mark.slow("two or seven kills, each with its recovery")
def test_a_rank_killed_in_every_phase_of_an_iteration(
    name: str, nproc: int, layout: dict[str, Any], tmp_path: Path
) -> None:
    iterations = 22 if nproc == 4 else 15
    flags_ = SPARSE | layout | {"train_iters": iterations}
    wanted = failure_free(nproc, **flags_)
    job = flags_ | as_strategy(name, tmp_path)
    faults = among(nproc, PHASES if nproc == 4 else PHASES[1:5:2])
    survived = survive(nproc, 2, tmp_path / "recovered", inject=faults, **job)
    assert survived.digest == digest_of(wanted)
    survived.check_metrics(iterations)
    # The job begins again if no checkpoint is durable yet when a rank dies.
    restarts = len(survived.events("restart"))
    assert restarts == 0 or name == "checkfreq"
    assert len(survived.failures()) + restarts == len(faults)
    assert_all_roll_back(survived, nproc)
    from_disk = survived.events("recovery_from_disk")
    assert len(from_disk) == (len(survived.failures()) if name == "checkfreq" else 0)
    assert main(["verify", str(wanted.folder), str(tmp_path / "recovered"), "--json"]) == 0


@pytest.mark.full
def test_what_is_not_durable_yet_is_not_resumed_from(tmp_path: Path) -> None:
    """Kill a rank before a checkpoint is on disk, which takes the job back to its beginning."""
    flags_ = SPARSE | {"pipeline_model_parallel_size": 2}
    wanted = failure_free_digest(2, **flags_ | {"moevement_replicas": 1})
    strategy = as_strategy("checkfreq", tmp_path) | {"moevement_dense_interval": 7}
    faults = ("rank=1,iteration=1,phase=backward", "rank=0,iteration=18,phase=backward")
    survived = survive(2, 2, tmp_path / "recovered", inject=faults, **flags_ | strategy)
    assert survived.digest == wanted
    survived.check_metrics(20)
    (event,) = survived.events("recovery_from_disk")
    assert re.search(rf"\b{event['window']}\b.*\b{event['until']}\b", event["text"])
    assert f"INFO rank 0: {event['text']}" in survived.out
    assert event["text"] not in survived.record.summary()["checkpointing"]["warnings"], "as the strategy has it"


@pytest.mark.full
def test_checkfreq_tunes_its_interval(tmp_path: Path) -> None:
    strategy = as_strategy("checkfreq", tmp_path) | {"moevement_dense_interval": False, "moevement_overhead_cap": 0.001}
    flags_ = SPARSE | {"pipeline_model_parallel_size": 2, "moevement_replicas": False, "train_iters": 60}
    record = train(2, tmp_path / "run", **flags_ | strategy)
    windows = [line["window"] for line in record.metrics()]
    assert windows[0] == 10
    assert len(set(windows)) > 1, windows


def test_gemini_sends_while_training_is_silent(tmp_path: Path) -> None:
    flags_ = SPARSE | {"pipeline_model_parallel_size": 2, "train_iters": 36}
    strategy: dict[str, Any] = {"moevement_window": False, "moevement_strategy": "gemini"}
    # A stage without survivors has lost its measurements; the other stage has them.
    faults = tuple(f"rank=1,iteration={at},phase=backward" for at in (15, 32))
    survived = survive(2, 2, tmp_path / "run", inject=faults, **flags_ | strategy)
    survived.check_metrics(36)
    windows = [line["window"] for line in survived.record.metrics()]
    assert set(windows[:25]) == {10}, "until all is measured"
    assert len(set(windows)) <= 2, "and chosen once"
    logs = [path.read_text() for path in (tmp_path / "run" / "logs").iterdir()]
    assert any(re.search(r"\bidle\b.*\d\.\d{3} s\b.*\b\d+ spans\b", text) for text in logs)
    wanted = failure_free(2, **flags_ | {"moevement_replicas": 1})
    assert survived.digest == digest_of(wanted)


def test_no_strategy_starts_over(tmp_path: Path) -> None:
    flags_: dict[str, Any] = SPARSE | {"pipeline_model_parallel_size": 2, "moevement_replicas": 1}
    wanted = failure_free_digest(2, **flags_)
    strategy: dict[str, Any] = {"moevement_window": False, "moevement_strategy": "none", "moevement_replicas": False}
    record = train(2, tmp_path / "run", **flags_ | strategy)
    assert record.summary()["state_digest"]["all"] == wanted
    assert not record.summary().get("checkpointing")
