"""Generator of the table in docs/guarantees.md, from the code. Run ``python scripts/guarantees_table.py``."""

from __future__ import annotations

from pathlib import Path

from moevement_core.run.guarantees import table

OUTPUT = Path(__file__).parents[1] / "docs" / "guarantees.md"


def page() -> str:
    """Return the page with a new table in place of the old one, whose first column has no heading."""
    lines = OUTPUT.read_text(encoding="utf-8").splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("| |"))
    last = next(number for number in range(first, len(lines)) if not lines[number].startswith("|"))
    return "\n".join([*lines[:first], *table(), *lines[last:], ""])


if __name__ == "__main__":
    OUTPUT.write_text(page(), encoding="utf-8")
