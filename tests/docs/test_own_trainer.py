"""The guide to other trainers shows code of the example, and the reference lists every method of the class."""

from __future__ import annotations

import re

import pytest

from moevement_core import Binding
from scripts import binding_table
from tests.docs.commands import blocks
from tests.training import ROOT

SHOWN = {"own_trainer.md": "small.py", "own_binding.md": "own_binding.py"}
"""Example of which each page shows code."""


@pytest.mark.parametrize(("page", "example"), SHOWN.items())
def test_the_code_is_that_of_the_example(page: str, example: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    (block,) = [block for block in blocks(text) if block.language == "python"]
    of_example = {
        line.strip() for line in (ROOT / "examples" / "plain_torch" / example).read_text(encoding="utf-8").splitlines()
    }
    lines = [line.strip() for line in block.lines if line.strip()]
    assert len(lines) > 7
    assert not set(lines) - of_example


def test_an_example_with_experts_fits_on_a_page_and_a_half() -> None:
    assert len((ROOT / "examples" / "plain_torch" / "train.py").read_text(encoding="utf-8").splitlines()) <= 150


def test_the_reference_is_up_to_date() -> None:
    assert binding_table.OUTPUT.read_text(encoding="utf-8") == binding_table.page(), (
        "run: python scripts/binding_table.py"
    )


def test_the_guide_names_every_method_that_has_to_be_written() -> None:
    text = (ROOT / "docs" / "own_binding.md").read_text(encoding="utf-8")
    assert len(Binding.__abstractmethods__) == 8
    assert not {name for name in Binding.__abstractmethods__ if not re.search(rf"`{name}\(", text)}
