"""Writer of the command outputs that pages show; ``python -m tests.docs.outputs`` updates them.

The block of text after ``<!-- output -->`` is the output of the last command above it, 100 columns wide.
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
    """Run the commands of a page and return the page with their present outputs."""
    return _BLOCK.sub(lambda block: block["before"] + output_of(block["command"]) + block["after"], page)


def output_of(command: str) -> str:
    """Return the output of a command, without blanks at the ends of lines."""
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
    """Update the outputs that a page shows, in place."""
    path.write_text(with_outputs(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    for page in PAGES:
        write(page)
