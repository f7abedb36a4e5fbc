"""Pages stay short enough to be read in one go."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training import ROOT

MOST_WORDS = 1200
MOST_LINES_OF_README = 150
LOOKED_UP = {"flags.md", "events.md", "metrics.md", "papers.md"}
"""Tables in which a reader looks one entry up."""


@pytest.mark.parametrize(
    "page",
    [path for path in sorted((ROOT / "docs").glob("*.md")) if path.name not in LOOKED_UP],
    ids=lambda path: path.name,
)
def test_a_page_answers_one_question_in_few_words(page: Path) -> None:
    assert len(page.read_text(encoding="utf-8").split()) <= MOST_WORDS


def test_the_readme_fits_a_short_read() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= MOST_LINES_OF_README
