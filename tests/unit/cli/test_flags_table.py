"""The table in docs/flags.md lists the flags of the parser."""

from __future__ import annotations

from scripts import flags_table


def test_the_table_of_flags_is_up_to_date() -> None:
    assert flags_table.OUTPUT.read_text(encoding="utf-8") == flags_table.table(), "run: python scripts/flags_table.py"
