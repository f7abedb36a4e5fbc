"""The list of what became of the papers' items names tests that exist, and a reason for each item left out."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.training import ROOT

PAGE = ROOT / "docs" / "papers.md"
PAPERS = ("MoEvement", "MoEtion", "MoC-System", "Lazarus")
STATES = {"live", "simulated", "live, simulated", "left out"}
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
_LINK = re.compile(r"\]\(([^)#]+)")


def _rows(paper: str) -> list[list[str]]:
    (section,) = [part for part in PAGE.read_text(encoding="utf-8").split("\n## ") if part.startswith(paper)]
    lines = [line for line in section.splitlines() if line.startswith("| ") and not line.startswith("| item")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


@cache
def _tests_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("paper", PAPERS)
def test_every_item_has_a_state_and_what_shows_it(paper: str) -> None:
    rows = _rows(paper)
    assert len(rows) >= 15
    for row in rows:
        assert len(row) == 3, row
        item, state, evidence = row
        assert state in STATES, item
        if state == "left out":
            assert len(evidence.split()) >= 4, f"{item}: left out without a reason"
            assert evidence.endswith("."), item
        else:
            assert _TEST.search(evidence) or _LINK.search(evidence), f"{item}: neither a test nor a page"


@pytest.mark.parametrize("paper", PAPERS)
def test_named_tests_and_pages_exist(paper: str) -> None:
    for item, _, evidence in _rows(paper):
        for path, name in _TEST.findall(evidence):
            assert name in _tests_of(path), f"{item}: {path} has no {name}"
        for target in _LINK.findall(evidence):
            assert (PAGE.parent / target).resolve().is_file(), f"{item}: {target}"


def test_every_table_and_figure_of_moevement_is_listed() -> None:
    """Check the numbers that MoEvement gives its figures and tables: 16 figures and 7 tables."""
    text = " ".join(item for item, *_ in _rows("MoEvement"))
    figures = re.findall(r"\d+", " ".join(re.findall(r"Figures? ([\d, and]+)", text)))
    assert {int(number) for number in figures} == set(range(1, 17))
    assert {int(number) for number in re.findall(r"Table (\d)", text)} == set(range(1, 8))
