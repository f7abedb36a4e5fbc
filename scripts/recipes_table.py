"""Generator of the tables in docs/determinism.md, from the recipes. Run ``python scripts/recipes_table.py``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the script imports the tests, which are not installed

from tests.determinism.recipes import RECIPES, TrainingRecipe  # noqa: E402

OUTPUT = ROOT / "docs" / "determinism.md"
_HEADING = "| recipe | features | ranks | kills in CI | gates that it fails |"


def table(recipes: Sequence[TrainingRecipe] = RECIPES) -> list[str]:
    """Return the lines of the table of recipes."""
    rows = [
        f"| `{recipe.name}` | {recipe.subject} | {recipe.nproc}: {recipe.layout} | {', '.join(recipe.kills) or '-'} | "
        f"{_failures(recipe)} |"
        for recipe in recipes
    ]
    return [_HEADING, "|---|---|---|---|---|", *rows]


def _failures(recipe: TrainingRecipe) -> str:
    return "; ".join(f"{gate.replace('_', ' ')}: {reason}" for gate, reason in recipe.fails.items()) or "-"


def page() -> str:
    """Return the page with a new table in place of the old one."""
    lines = OUTPUT.read_text(encoding="utf-8").splitlines()
    first = lines.index(_HEADING)
    last = next(number for number in range(first, len(lines)) if not lines[number].startswith("|"))
    return "\n".join([*lines[:first], *table(), *lines[last:], ""])


if __name__ == "__main__":
    OUTPUT.write_text(page(), encoding="utf-8")
