"""Killed ranks are restored by redone updates, and the run ends with the bits of a failure-free run.

If peers have copies of the newest gradients, only the lost rank is restored, and no iteration is re-executed.
Otherwise its stage goes on from the newest gradients that peers have.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from moevement_cli.main import main
from moevement_core.storage.manifest import manifests
from tests.failure_free import digest_of, failure_free, failure_free_digest
from tests.functional.jobs import EIGHT_PHASES, LAYOUTS, MICRO_BATCHES, SPARSE, WIDTHS, among, killed_from_outside
from tests.launching import Survived, launch, logs, survive
from tests.launching import finished as finished_job
from tests.training import SCRIPT, flags

REDO: dict[str, Any] = {"moevement_recovery": "redo"}
EVERY_PHASE: dict[str, tuple[int, tuple[str, ...]]] = {
    "PP2": (
        18,
        (
            "rank=1,iteration=4,phase=backward", "rank=0,iteration=8,phase=commit", "rank=1,iteration=11,phase=gather",
            "rank=0,iteration=15,phase=replicate",
        ),
    ),
    "PP2xEP2": (30, EIGHT_PHASES),
}  # fmt: skip
"""Iterations and faults by layout; ``test_kills.py`` has the other four phases for two ranks."""


def _alone(survived: Survived) -> list[bool]:
    """Return, for each recovery, True if it restored one rank by redone updates and replayed no iteration."""
    recoveries = [failure["recovery"] for failure in survived.failures() if failure["recovery"]]
    return [
        recovery["redone"] > 0 and recovery["replayed"] == 0 and len(recovery["ranks"]) == 1 for recovery in recoveries
    ]


@WIDTHS
@pytest.mark.slow("four or eight kills, each with its recovery")
def test_a_rank_killed_in_every_phase_of_an_iteration(layout: str, tmp_path: Path) -> None:
    nproc, of_layout = LAYOUTS[layout]
    iterations, faults = EVERY_PHASE[layout]
    flags_ = SPARSE | of_layout | MICRO_BATCHES | {"train_iters": iterations}
    wanted = failure_free(nproc, **flags_)
    survived = survive(nproc, 2, tmp_path / "recovered", inject=faults, **flags_ | REDO)
    assert survived.digest == digest_of(wanted)
    survived.check_metrics(iterations)
    assert len(survived.failures()) == len(faults)
    assert any(_alone(survived)), "in some of these phases the newest gradients are with peers"
    assert main(["verify", str(wanted.folder), str(tmp_path / "recovered"), "--json"]) == 0
    recoveries = [failure["recovery"] for failure in survived.failures() if failure["recovery"]]
    recovery = recoveries[_alone(survived).index(True)]
    assert re.search(rf"\b{recovery['redone']} updates\b.*\brank {recovery['ranks'][0]}\b", survived.out)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.full) for name in ("PP4", "VPP2", "PP2xDP2", "TP2xPP2")
    ],
)  # fmt: skip
def test_layouts(name: str, tmp_path: Path) -> None:
    """Cover FP32, FP16 with overflows, interleaved stages, and replicas with and without distributed optimizer."""
    nproc, layout = LAYOUTS[name]
    flags_ = SPARSE | layout
    wanted = failure_free_digest(nproc, **flags_)
    faults = (
        "rank=1,iteration=2,phase=forward", f"rank={nproc - 1},iteration=7,phase=backward",
        "rank=0,iteration=12,phase=gather", f"rank={nproc - 1},iteration=17,phase=commit",
    )  # fmt: skip
    survived = survive(nproc, 2, tmp_path / "recovered", inject=faults, **flags_ | REDO)
    assert survived.digest == wanted
    survived.check_metrics(20)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"bf16": True}, marks=pytest.mark.full),
        pytest.param(
            {"bf16": True, "grad_reduce_in_bf16": True, "use_distributed_optimizer": True}, marks=pytest.mark.full
        ),
        pytest.param(
            {"fp16": True, "initial_loss_scale": 2**16, "use_distributed_optimizer": True}, marks=pytest.mark.full
        ),
        pytest.param(
            {"fp16": True, "initial_loss_scale": 2**16, "accumulate_allreduce_grads_in_fp32": True},
            marks=pytest.mark.full,
        ),
        pytest.param({"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
                     marks=pytest.mark.full),
    ],
    ids=["BF16 replicas", "BF16 gradients", "FP16 gradients", "FP16 in FP32 gradients", "FP32 overlapped"],
)  # fmt: skip
def test_without_a_pipeline_in_every_form_of_gradients(layout: dict[str, Any], tmp_path: Path) -> None:
    flags_ = SPARSE | layout | {"moevement_replicas": 1}
    wanted = failure_free_digest(2, **flags_)
    faults = (
        "rank=1,iteration=3,phase=forward",
        "rank=0,iteration=8,phase=backward",
        "rank=1,iteration=15,phase=gather",
    )
    survived = survive(2, 2, tmp_path / "recovered", inject=faults, **flags_ | REDO)
    assert survived.digest == wanted
    survived.check_metrics(20)
    if layout.get("use_distributed_optimizer"):
        assert any(_alone(survived))
    else:  # the other rank has the whole state
        recoveries = [failure["recovery"] for failure in survived.failures()]
        assert all(recovery["replayed"] == recovery["redone"] == 0 for recovery in recoveries)


@pytest.mark.full
@WIDTHS
@pytest.mark.slow("several kills")
def test_failures_while_updates_are_made_again(layout: str, tmp_path: Path) -> None:
    nproc, overrides = LAYOUTS[layout]
    flags_ = SPARSE | overrides
    wanted = failure_free_digest(nproc, **flags_)
    faults = (
        "rank=1,iteration=7,phase=forward", "rank=1,phase=redo", "rank=0,phase=recover", "rank=3,phase=recover",
        "rank=2,iteration=15,phase=backward",
    )  # fmt: skip
    survived = survive(nproc, 2, tmp_path / "recovered", inject=among(nproc, faults), **flags_ | REDO)
    assert survived.digest == wanted
    survived.check_metrics(20)


@pytest.mark.full
def test_iterations_that_are_left_out_and_updates_that_are_torn(tmp_path: Path) -> None:
    """Skip iterations, which leave no gradients. Raise inside an update; other ranks have the record of that step."""
    flags_ = SPARSE | {"pipeline_model_parallel_size": 2, "moevement_replicas": 1, "clip_grad": 0.1,
                       "iterations_to_skip": [7, 12]}  # fmt: skip
    wanted = failure_free_digest(2, **flags_)
    faults = (
        "rank=1,iteration=8,phase=forward", "rank=0,iteration=10,phase=step,signal=EXC",
        "rank=0,iteration=11,phase=forward", "rank=1,iteration=13,phase=backward",
        "rank=0,iteration=14,phase=backward", "rank=1,iteration=18,phase=gather",
    )  # fmt: skip
    survived = survive(2, 2, tmp_path / "recovered", inject=faults, **flags_ | REDO)
    assert survived.digest == wanted


@pytest.mark.full
def test_a_stage_with_fewer_operators_than_slots(tmp_path: Path) -> None:
    flags_ = SPARSE | {"pipeline_model_parallel_size": 2, "moevement_replicas": 1, "moevement_window": 8,
                       "decoder_first_pipeline_num_layers": 1, "num_layers": 4, "num_experts": 2}  # fmt: skip
    wanted = failure_free_digest(2, **flags_)
    faults = (
        "rank=0,iteration=5,phase=forward",
        "rank=1,iteration=12,phase=forward",
        "rank=0,iteration=17,phase=commit",
    )
    survived = survive(2, 2, tmp_path / "recovered", inject=faults, **flags_ | REDO)
    assert survived.digest == wanted
    survived.check_metrics(20)


@pytest.mark.full
def test_a_whole_stage_dies_at_once(tmp_path: Path) -> None:
    """Kill both ranks of a stage: each is restored from its own gradients, and the other stage feeds neither."""
    nproc, layout = LAYOUTS["PP2xEP2"]
    flags_ = SPARSE | layout | {"moevement_replicas": 2}
    wanted = failure_free_digest(nproc, **flags_)
    faults = ("rank=2,iteration=10,phase=backward", "rank=3,iteration=10,phase=backward")
    survived = survive(nproc, 3, tmp_path / "recovered", inject=faults, **flags_ | REDO)
    assert survived.digest == wanted
    survived.check_metrics(20)


@pytest.mark.full
def test_a_job_starts_from_gradients_on_disk(tmp_path: Path) -> None:
    """Kill all ranks at once, so that memory holds nothing any more."""
    flags_ = SPARSE | {"pipeline_model_parallel_size": 2, "moevement_replicas": 1, "train_iters": 40}
    wanted = failure_free_digest(2, **flags_)
    windows = tmp_path / "windows"
    words = flags(**flags_ | REDO, moevement_persist_dir=str(windows), moevement_load=str(windows))
    survived = killed_from_outside(
        tmp_path / "recovered", (0, 1), lambda newest: newest >= 20 and bool(manifests(windows)), "--nproc", "2",
        "--spares", "2", str(SCRIPT), *words,
    )  # fmt: skip
    assert survived.digest == wanted
    survived.check_metrics(40)
    restart = survived.events("restart")[0]
    assert "window" in restart["text"]
    assert restart["iteration"] > 0


@pytest.mark.parametrize(
    ("gigabytes_per_s", "method"), [("100", "redo"), pytest.param("0.000001", "replay", marks=pytest.mark.full)]
)
def test_what_is_measured_decides(gigabytes_per_s: str, method: str, tmp_path: Path) -> None:
    """Kill ranks before the job has measured enough to choose its method of recovery, and twice after its choice."""
    flags_ = SPARSE | {"pipeline_model_parallel_size": 2, "moevement_replicas": 1, "train_iters": 30}
    wanted = failure_free_digest(2, **flags_)
    faults = (
        "rank=1,iteration=6,phase=forward",
        "rank=0,iteration=19,phase=backward",
        "rank=1,iteration=27,phase=step",
    )
    survived = survive(
        2, 2, tmp_path / "recovered", inject=faults, **flags_, moevement_recovery="auto",
        moevement_network_bandwidth=gigabytes_per_s, moevement_bandwidth="100",
    )  # fmt: skip
    assert survived.digest == wanted
    survived.check_metrics(30)
    assert len(re.findall(rf"\bby {method}\b", survived.out)) == 1
    last = survived.failures()[-1]["recovery"]
    assert (last["redone"] > 0) == (method == "redo")


@pytest.mark.full
def test_windows_take_the_place_of_gradients_that_have_no_room(tmp_path: Path) -> None:
    flags_ = SPARSE | {"pipeline_model_parallel_size": 2, "moevement_replicas": 1, "bf16": True}
    wanted = failure_free_digest(2, **flags_)
    tight = _least_memory(tmp_path, **flags_)
    survived = survive(
        2, 1, tmp_path / "recovered", inject=("rank=1,iteration=9,phase=forward",),
        **flags_ | REDO, moevement_host_memory_gb=tight,
    )  # fmt: skip
    assert survived.digest == wanted
    assert re.search(r"\bby replay\b.*\bhost memory\b.*\brank \d\b", survived.out)
    assert survived.failures()[0]["recovery"]["redone"] == 0


def _least_memory(tmp_path: Path, **flags_: Any) -> str:
    """Return the gigabytes that windows without gradients need, from the message of a refused job."""
    code, _, err = finished_job(
        launch("--nproc", "2", str(SCRIPT), *flags(**flags_, moevement_host_memory_gb="0.000001"), "--run-dir",
               str(tmp_path / "refused"))
    )  # fmt: skip
    assert code == 2, logs(tmp_path / "refused")
    needed = re.search(r"\brank \d\b.*?([\d.]+) GB\b", err)
    assert needed is not None, err
    return needed[1]
