"""docs/flags.md is what the parser says."""

from __future__ import annotations

from scripts import flags_table


def test_the_table_of_flags_is_up_to_date() -> None:
    assert flags_table.OUTPUT.read_text(encoding="utf-8") == flags_table.table(), "run: python scripts/flags_table.py"
