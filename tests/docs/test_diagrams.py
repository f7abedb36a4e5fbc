"""The diagrams in docs/diagrams are those that scripts/diagrams.py draws."""

from __future__ import annotations

import pytest

from scripts import diagrams


@pytest.mark.parametrize("name", diagrams.DIAGRAMS)
def test_a_diagram_is_up_to_date(name: str) -> None:
    drawn = (diagrams.OUTPUT / f"{name}.svg").read_text(encoding="utf-8")
    assert drawn == diagrams.svg(name), "run: python scripts/diagrams.py"


def test_there_are_no_others() -> None:
    assert {path.stem for path in diagrams.OUTPUT.iterdir()} == set(diagrams.DIAGRAMS)
