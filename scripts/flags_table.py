"""Generator of docs/flags.md, the flags that this project adds to Megatron's. Run ``python scripts/flags_table.py``."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron.moevement.arguments import add_arguments

OUTPUT = Path(__file__).parents[1] / "docs" / "flags.md"
DRILLS = ("--moevement-inject", "--moevement-wipe")
"""Prefixes of flags that make failures happen."""


def table() -> str:
    """Return the text of the page."""
    parser = add_arguments(argparse.ArgumentParser(add_help=False))
    flags = [action for action in parser._actions if action.option_strings]
    drills = [action for action in flags if action.option_strings[0].startswith(DRILLS)]
    used = [action for action in flags if action not in drills]
    return "\n".join(
        [
            "# Flags",
            "",
            "This page lists the flags that this project adds to Megatron's. `python scripts/flags_table.py` writes it",
            "from the parser, and a test compares. Without `--moevement-sparse-ckpt` a job saves nothing, and the",
            "other flags have no effect.",
            "",
            *_rows(used),
            "",
            "## Drills",
            "",
            "These flags cause failures, to rehearse recoveries ([drills.md](drills.md)).",
            "",
            *_rows(drills),
            "",
        ]
    )


def _rows(actions: list[argparse.Action]) -> list[str]:
    rows = [f"| `{_usage(action)}` | {_escaped(action.help or '')} |" for action in actions]
    return ["| flag | |", "|---|---|", *rows]


def _usage(action: argparse.Action) -> str:
    (flag,) = action.option_strings
    if action.nargs == 0:
        return flag
    value = action.metavar or "|".join(map(str, action.choices or ())) or action.dest.upper()
    return _escaped(f"{flag} {value}" + (" ..." if action.nargs == "+" else ""))


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    OUTPUT.write_text(table(), encoding="utf-8")
