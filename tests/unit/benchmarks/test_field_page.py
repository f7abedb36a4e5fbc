"""Page of the large jobs: its small job is computed again, and its inputs agree with their sources.

tests/docs/test_computed_pages.py computes the whole page again.
"""

from __future__ import annotations

import itertools

import pytest

from benchmarks.papers import field
from benchmarks.papers.field_published import CAUSES, REPORTS, Report
from moevement_core.simulator.failure_rate import LLAMA_FAILURES, LLAMA_GPUS
from moevement_core.simulator.scenario import load

PAGE = field.OUTPUT.read_text(encoding="utf-8").splitlines()
(TORCHPASS,) = [source for source in REPORTS if source.source == "TorchPass"]


def _line(row: list[str]) -> str:
    return f"| {' | '.join(row)} |"


def test_the_row_of_the_small_job_is_on_the_page() -> None:
    costs = field.costs_of(TORCHPASS)
    cells = field.simulated(TORCHPASS, costs)
    rows = [
        field.job_row(TORCHPASS, costs),
        field.result_row(TORCHPASS.source, cells),
        *field.claim_rows(TORCHPASS, cells),
    ]
    assert [row for row in rows if _line(row) not in PAGE] == []


def test_causes_and_regrouping_are_on_the_page() -> None:
    rows = [*field.cause_rows(), *(field.part_row(source.ranks) for source in REPORTS)]
    assert [row for row in rows if _line(row) not in PAGE] == []
    assert [source.source for source in REPORTS if field.source_line(source) not in "\n".join(PAGE)] == []


def test_causes_are_all_interruptions_of_llama() -> None:
    assert sum(cause.count for cause in CAUSES) == LLAMA_FAILURES == field.TOTAL
    assert pytest.approx(63 / LLAMA_FAILURES) == field.PROCESSES
    assert 0.1 < field.DETECT_S < 10


@pytest.mark.parametrize("source", REPORTS, ids=lambda source: source.source)
def test_a_job_has_its_reported_size(source: Report) -> None:
    assert abs(source.ranks / source.gpus - 1) < 0.02
    base = load(field.SCENARIOS / f"{source.preset}.yaml").job
    grown = load(field.SCENARIOS / f"{source.preset}.yaml", source.ranks, grows_batch=True).job
    assert grown.ranks == source.ranks
    assert grown.micro_batches == base.micro_batches
    assert source.gpus != LLAMA_GPUS or source.mtbf_s == pytest.approx(54 * 86_400 / LLAMA_FAILURES)


def test_failures_keep_their_spacing() -> None:
    failures = field.spaced((2700.0, 4500.0), 8, 10 * field.DAY_S, 0)
    gaps = [later.at_s - earlier.at_s for earlier, later in itertools.pairwise(failures)]
    assert min(gaps) >= 2700
    assert max(gaps) <= 4500
    assert sum(gaps) / len(gaps) == pytest.approx(3600, rel=0.05)
    assert failures == field.spaced((2700.0, 4500.0), 8, 10 * field.DAY_S, 0)


def test_seconds_that_a_ratio_allows() -> None:
    assert field.allowed_s(0.5, 600.0) == pytest.approx(600)
