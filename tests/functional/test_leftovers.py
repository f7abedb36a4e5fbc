"""Survivors that a failure interrupts in the middle of a step go on with the bits of a failure-free run.

A drill makes one rank wait in the middle of a step. The test then kills another rank from outside, so the exception
of the restart is raised exactly there.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from moevement_core.run.run_record import RunRecord
from tests.failure_free import digest_of, failure_free
from tests.functional.bodies import spoiled_and_cleared
from tests.functional.jobs import SPARSE
from tests.harness import run_ranks
from tests.launching import Launcher, Survived, finished, launch, logs
from tests.training import SCRIPT, flags, outcomes

PP2: dict[str, Any] = {"pipeline_model_parallel_size": 2, "moevement_replicas": 1}
PP2xDP2: dict[str, Any] = {
    "pipeline_model_parallel_size": 2, "use_distributed_optimizer": True, "overlap_grad_reduce": True,
    "overlap_param_gather": True, "bf16": True, "attention_dropout": 0.1,
}  # fmt: skip


def kill_when_waiting(job: Launcher, run_dir: Path, kills: dict[str, int]) -> None:
    """Kill a rank as soon as another rank waits at a place.

    Args:
        kills: rank to kill for each place, such as ``fork of iteration 9``.
    """
    left = dict(kills)
    while job.poll() is None and left:
        time.sleep(0.05)
        text = "".join(path.read_text(errors="replace") for path in (run_dir / "logs").glob("*"))
        for place in set(re.findall(r"injecting WAIT into rank \d+ at (\w+ of iteration \d+)", text)) & left.keys():
            (pid,) = [process["pid"] for process in ranks_of(run_dir) if process["rank"] == left[place]]
            del left[place]
            os.kill(pid, signal.SIGKILL)
    assert not left


def ranks_of(run_dir: Path) -> list[dict[str, Any]]:
    return list(json.loads(RunRecord(run_dir).ranks_path.read_text()))


def interrupt(nproc: int, run_dir: Path, places: dict[tuple[int, str, int], int], **flags_: Any) -> Survived:
    """Run a job; interrupt ranks at ``places``, which map rank, phase and iteration to the rank that is killed then."""
    words = flags(**flags_)
    for rank, phase, iteration in places:
        words += ["--moevement-inject", f"rank={rank},iteration={iteration},phase={phase},signal=WAIT"]
    job = launch("--nproc", str(nproc), "--spares", "1", str(SCRIPT), *words, "--run-dir", str(run_dir))
    try:
        kill_when_waiting(
            job, run_dir, {f"{phase} of iteration {at}": killed for (_, phase, at), killed in places.items()}
        )
    finally:
        code, out, err = finished(job)
    assert code == 0, f"{out}\n{err}\n{logs(run_dir)}"
    return Survived(run_dir, out)


@pytest.mark.parametrize(
    ("iterations", "places"),
    [
        pytest.param(12, {(3, "fork", 6): 0, (1, "copy", 9): 3}, id="two"),
        pytest.param(
            20, {(3, "accumulate", 6): 1, (3, "fork", 9): 0, (0, "ready", 12): 2, (1, "copy", 15): 3},
            marks=pytest.mark.full, id="four",
        ),
    ],
)  # fmt: skip
@pytest.mark.slow("a job of four ranks with two or four kills")
def test_a_survivor_is_interrupted_in_the_middle_of_a_step(
    iterations: int, places: dict[tuple[int, str, int], int], tmp_path: Path
) -> None:
    """Interrupt ranks that wait in a step and keep their state, as ranks of the other stage are killed."""
    flags_ = SPARSE | PP2xDP2 | {"train_iters": iterations}
    wanted = failure_free(4, **flags_)
    survived = interrupt(4, tmp_path / "interrupted", places, **flags_)
    assert survived.digest == digest_of(wanted)
    survived.check_metrics(iterations)
    assert [failure["recovery"]["until"] for failure in survived.failures()] == [at - 1 for _, _, at in places]
    for failure in survived.failures():
        # Two ranks kept their state. Their comparison with a snapshot covered 2 as a whole, 0 in part, 0 not at all.
        assert re.findall(r"\d+", failure["kept"]) == ["2", "2", "0", "0"], failure["kept"]


@pytest.mark.full
def test_a_decision_about_windows_that_only_some_ranks_have_made(tmp_path: Path) -> None:
    """Interrupt rank 0 in a decision that rank 1 of its stage has made already: both go on with the new order."""
    flags_ = SPARSE | PP2xDP2 | {"moevement_window": 3}
    wanted = failure_free(4, **flags_)
    places = {(0, "decide", 4): 2, (1, "decide", 10): 0}
    survived = interrupt(4, tmp_path / "interrupted", places, **flags_)
    assert survived.digest == digest_of(wanted)
    survived.check_metrics(20)
    assert [failure["recovery"]["until"] for failure in survived.failures()] == [3, 9]
    assert [failure["recovery"]["ranks"] for failure in survived.failures()] == [[2, 3], [0, 1]], "the lost stage alone"
    summary = survived.record.summary()["checkpointing"]
    assert summary["reorders"] > 0
    assert summary["windows_abandoned"] == 0, "the ranks of a stage save the same operators in the same slots"


@pytest.mark.parametrize("phase", ["accumulate", pytest.param("fork", marks=pytest.mark.full)])
def test_places_inside_a_step_are_drilled_without_spares_too(phase: str) -> None:
    drill = {"moevement_inject": f"rank=0,iteration=2,phase={phase},signal=EXC", "attention_dropout": 0.1}
    (ended,) = outcomes(1, None, check=False, **SPARSE | drill | {"train_iters": 3})
    assert re.search(rf"\bEXC\b.*\brank 0\b.*\b{phase}\b.*\biteration 2\b", ended.output)
    assert ended.exit_code == 1


def test_everything_that_is_half_done_is_taken_away(tmp_path: Path) -> None:
    words = flags(**SPARSE | PP2xDP2 | {"pipeline_model_parallel_size": 1, "moevement_replicas": 1, "train_iters": 2})
    argv = [str(SCRIPT), *words]
    for outcome in run_ranks(spoiled_and_cleared, 2, argv, init_process_group=False):
        state = outcome.result
        parameters = {name for name in state["names"] if any(name in line.split() for line in state["left"])}
        assert parameters == set(state["names"])
        assert len(parameters) > 20
        assert re.search(r"\bbuffer \d+$", state["left"][-1])
        assert state["still_there"] == state["left"]
        assert (state["after"], state["masters"]) == ([], 0)
        assert state["thread"] == (True, False, False)
        assert state["switches"] == (False, "default-rng", False, True)
        assert all(group == ({}, True, False, None, None) for group in state["groups"])
        assert set(state["hooks"]) == {1}
