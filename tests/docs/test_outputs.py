"""Command outputs on pages, and tables that a script computes, are up to date."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import worth_it
from tests.docs.outputs import PAGES, with_outputs


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_outputs_are_what_the_commands_print(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.count("<!-- output -->") >= 1
    assert with_outputs(text) == text
    assert with_outputs(text.replace("│ redo", "│ rode")) == text, "a wrong output is found"


def test_the_table_of_sizes_is_what_the_script_computes() -> None:
    text = worth_it.PAGE.read_text(encoding="utf-8")
    assert worth_it.with_table(text) == text
    rows = [line.split("|") for line in worth_it.table().splitlines()[2:]]
    assert len(rows) == len(worth_it.GPUS) * len(worth_it.RATES)
    assert {row[-2].strip() for row in rows} == {"yes", "no"}
