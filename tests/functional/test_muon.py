"""Jobs with Muon survive kills: an update needs a whole matrix, and a replay updates active operators alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.failure_free import failure_free_digest
from tests.functional.jobs import SPARSE, among, assert_alone
from tests.launching import survive

FULL = pytest.mark.full
PP2 = {"pipeline_model_parallel_size": 2}
FAULTS = (
    "rank=1,iteration=5,phase=forward", "rank=3,iteration=9,phase=backward", "rank=2,iteration=13,phase=step",
    "rank=0,iteration=16,phase=snapshot",
)  # fmt: skip


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(PP2 | {"bf16": True, "moevement_replicas": 1}, id="PP2-BF16"),
        pytest.param(PP2 | {"expert_model_parallel_size": 2, "bf16": True}, id="PP2xEP2-BF16", marks=FULL),
        pytest.param(PP2 | {"muon_nesterov": True}, id="PP2xDP2-FP32", marks=FULL),
        pytest.param(
            PP2 | {"bf16": True, "use_distributed_optimizer": True}, id="PP2xDP2-BF16-distributed", marks=FULL,
        ),
        pytest.param(
            PP2 | {"tensor_model_parallel_size": 2, "sequence_parallel": True, "bf16": True},
            id="TP2xPP2-BF16", marks=FULL,
        ),
    ],
)  # fmt: skip
@pytest.mark.slow("two or four kills")
def test_matrices_are_updated_again_as_they_were(layout: dict[str, Any], tmp_path: Path) -> None:
    nproc, iterations = (2, 15) if layout.get("moevement_replicas") == 1 else (4, 20)
    flags = SPARSE | layout | {"optimizer": "muon", "train_iters": iterations}
    faults = among(nproc, FAULTS, every=2)
    wanted = failure_free_digest(nproc, **flags)
    survived = survive(nproc, 1, tmp_path / "recovered", inject=faults, **flags)
    assert survived.digest == wanted
    survived.check_metrics(iterations)
    assert len(survived.failures()) == len(faults)
    assert_alone(survived, 2)
