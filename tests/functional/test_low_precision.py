"""Jobs with narrow optimizer state survive kills: all five rows of the paper's table 7, and regimes between them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.failure_free import failure_free_digest
from tests.functional.jobs import KILLS, LAYOUTS, REGIMES, SPARSE, WIDTHS, among
from tests.launching import survive

QUICK = {"FP8/FP16/FP8+FP16"}
FROM_THE_START = "rank=1,iteration=2,phase=forward"
"""Early fault. A job makes masters narrower than weights before its first iteration; a replacement makes them, too."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.full]) for name in REGIMES]
)
@pytest.mark.parametrize("recovery", ["replay", pytest.param("redo", marks=pytest.mark.full)])
@pytest.mark.full
@WIDTHS
@pytest.mark.slow("six kills in emulated FP8")
def test_killed_in_every_regime(layout: str, name: str, recovery: str, tmp_path: Path) -> None:
    nproc, overrides = LAYOUTS[layout]
    flags_ = SPARSE | overrides | {"bf16": True} | REGIMES[name]
    wanted = failure_free_digest(nproc, **flags_)
    kills = among(nproc, (FROM_THE_START, *KILLS), every=2)
    survived = survive(nproc, 2, tmp_path / "recovered", inject=kills, **flags_, moevement_recovery=recovery)
    assert survived.digest == wanted
    survived.check_metrics(20)
