"""Generator of docs/events.md, the reference of the records of events.jsonl. Run ``python scripts/events_table.py``."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

from moevement_core.run import events
from moevement_core.run.account import Account
from moevement_core.run.outcome import Recovery

OUTPUT = Path(__file__).parents[1] / "docs" / "events.md"


def table() -> str:
    """Return the text of the page."""
    kinds: tuple[Any, ...] = (*events.PLAIN, Recovery, Account)
    return "\n".join(
        [
            "# Events",
            "",
            "`events.jsonl` in a run directory has one JSON object a line: `event`, the kind; `time`, seconds since",
            "the epoch; and the fields below. `python scripts/events_table.py` writes this page, and a test compares.",
            "",
            *(line for kind in kinds for line in _section(kind)),
        ]
    )


def _section(kind: Any) -> list[str]:
    (tree,) = ast.parse(inspect.cleandoc(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    rows, body = [], tree.body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id != "kind":
            statement_value = after.value if isinstance(after, ast.Expr) else None
            text = str(statement_value.value) if isinstance(statement_value, ast.Constant) else ""
            annotation = ast.unparse(node.annotation).replace("|", "\\|")
            rows.append(f"| `{node.target.id}` | `{annotation}` | {' '.join(text.split())} |")
    about = " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())
    return [f"## `{kind.kind}`", "", about, "", "| field | type | |", "|---|---|---|", *rows, ""]


if __name__ == "__main__":
    OUTPUT.write_text(table(), encoding="utf-8")
