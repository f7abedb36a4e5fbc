"""Outputs that pages show of the command before them, written by ``python -m tests.docs.outputs``.

A block of text that follows ``<!-- output -->`` is what the last command above it prints, 100 columns wide.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
from pathlib import Path

from moevement_cli import main as cli
from tests.training import ROOT

PAGES = (ROOT / "docs" / "worth_it.md",)
COLUMNS = "100"
_BLOCK = re.compile(r"(?P<before>```\n(?P<command>moevement [^\n]+)\n```\n(?:(?!```).)*?<!-- output -->\n```text\n)"
                    r"(?P<output>.*?)(?P<after>```\n)", re.DOTALL)  # fmt: skip


def with_outputs(page: str) -> str:
    """Return a page with the outputs of its commands of today."""
    return _BLOCK.sub(lambda block: block["before"] + output_of(block["command"]) + block["after"], page)


def output_of(command: str) -> str:
    """Return what a command prints, without blanks at the ends of lines."""
    output, columns = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = COLUMNS
    try:
        with contextlib.redirect_stdout(output):
            assert cli.main(shlex.split(command)[1:]) == 0
    finally:
        if columns is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = columns
    return "".join(f"{line.rstrip()}\n" for line in output.getvalue().splitlines())


def write(path: Path) -> None:
    """Write a page anew."""
    path.write_text(with_outputs(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    for page in PAGES:
        write(page)
