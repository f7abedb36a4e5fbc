"""Jobs that combine features of model, recovery and saving survive kills with the bits of a failure-free run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.failure_free import failure_free_digest
from tests.functional.jobs import LAYOUTS, SPARSE
from tests.functional.wiped import EXPERT_BIAS, TIED
from tests.launching import survive

PP2: dict[str, Any] = {"pipeline_model_parallel_size": 2, "moevement_replicas": 1}
FOUR = LAYOUTS["PP2xEP2"][1]


@dataclass(frozen=True)
class Case:
    """Job and the faults that happen to it."""

    nproc: int
    flags: dict[str, Any]
    faults: tuple[str, ...]
    fewest: int
    """Smallest number of interruptions. A fault in phase ``decide`` happens only if the job decides there."""
    saves: bool = False


CASES: dict[str, Case] = {
    "predicting ahead, expert bias": Case(
        2, PP2 | EXPERT_BIAS | {"mtp_num_layers": 1, "bf16": True},
        ("rank=1,iteration=7,phase=backward", "rank=0,iteration=13,phase=step"), 2,
    ),
    "redo, interleaved, tied embeddings, evaluations, skipped steps": Case(
        2, LAYOUTS["VPP2"][1] | TIED | {
            "initial_loss_scale": 2**24, "hysteresis": 1, "moevement_recovery": "redo", "eval_interval": 5,
            "eval_iters": 1, "hidden_dropout": 0.1,
        },
        ("rank=0,iteration=6,phase=forward", "rank=1,iteration=10,phase=eval", "rank=0,iteration=16,phase=gather"), 3,
    ),
    "own copies dropped, a second rank in the recovery from the first": Case(
        4, FOUR | {"moevement_keep_own": "never"},
        ("rank=1,iteration=9,phase=backward", "rank=3,phase=recover", "rank=2,iteration=16,phase=step"), 2,
    ),
    "windows that change": Case(
        2, PP2 | {"moevement_window": "auto", "moevement_bandwidth": "0.05", "moevement_network_bandwidth": "0.05"},
        tuple(f"rank={at % 2},iteration={at},phase=decide" for at in range(8, 16)), 1,
    ),
    "parity, and the replacement is lost, too": Case(
        4, FOUR | {"moevement_protection": "parity:3+1"},
        ("rank=0,iteration=9,phase=backward", "rank=0,phase=replay", "rank=3,iteration=16,phase=forward"), 2,
    ),
    "a dense save is due in the iteration that is killed": Case(
        2, PP2 | {"save_interval": 10}, ("rank=1,iteration=10,phase=gather", "rank=0,iteration=10,phase=save"), 2,
        saves=True,
    ),
    "the first iteration, the last one, and the final save": Case(
        2, PP2 | {"save_interval": 20},
        ("rank=0,iteration=1,phase=gather", "rank=1,iteration=20,phase=step", "rank=0,iteration=20,phase=save"), 3,
        saves=True,
    ),
}  # fmt: skip
QUICK = ("redo, interleaved, tied embeddings, evaluations, skipped steps",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.full) for name in CASES]
)
def test_features_that_meet(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    flags_ = SPARSE | case.flags
    wanted = failure_free_digest(
        case.nproc, **{name: value for name, value in flags_.items() if name != "save_interval"}
    )
    saves = {"save": str(tmp_path / "saved")} if case.saves else {}
    survived = survive(case.nproc, 2, tmp_path / "run", inject=case.faults, **flags_ | saves)
    assert survived.digest == wanted
    survived.check_metrics(20)
    interruptions = len(survived.failures()) + len(survived.events("restart"))
    assert interruptions >= case.fewest
    if case.saves:
        assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text() == "20"
