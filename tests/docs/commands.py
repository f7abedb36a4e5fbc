"""Parser of the shell commands in the documentation, and of the comments that say why no test runs a command."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.training import ROOT

PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
COMMANDS = ("moevement", "make", "python", "source", "sbatch", "docker")
"""First words of a block of shell commands. All other blocks are output, files or formulas."""
_MARKER = re.compile(r"<!-- not run: (.+?) -->")
_ASSIGNMENT = re.compile(r'([A-Z_]+)="([^"]*)"')


@dataclass(frozen=True)
class Command:
    """Command line of a page, with the values of variables in place of their names."""

    page: Path
    line: int
    words: tuple[str, ...]
    excuse: str
    """Reason that no test runs the command, from the comment in front of its block; empty if there is no comment."""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}: {shlex.join(self.words)}"


@dataclass(frozen=True)
class Block:
    """Fenced or indented block of a page."""

    line: int
    language: str
    lines: tuple[str, ...]
    excuse: str


def commands(page: Path) -> Iterator[Command]:
    """Yield all commands of a page. Variables keep their values to the end of the page, as in a reader's shell."""
    variables: dict[str, str] = {}
    for block in blocks(page.read_text(encoding="utf-8")):
        if not is_for_a_shell(block):
            continue
        for number, text in _logical_lines(block):
            if assigned := _ASSIGNMENT.fullmatch(text):
                variables[assigned[1]] = assigned[2]
                continue
            for name, value in variables.items():
                text = re.sub(rf"\${name}\b", value, text)
            if words := shlex.split(text, comments=True):
                yield Command(page, number, tuple(words), block.excuse)


def is_for_a_shell(block: Block) -> bool:
    """Return True if a reader types the block into a shell: its first line is a command or sets a variable."""
    if block.language not in ("", "bash", "sh"):
        return False
    first = next((line for line in block.lines if line.strip() and not line.lstrip().startswith("#")), "")
    return first.split(" ")[0] in (*COMMANDS, "$L") or _ASSIGNMENT.fullmatch(first) is not None


def blocks(text: str) -> Iterator[Block]:
    """Yield the fenced blocks of a text, and the indented blocks that follow an empty line."""
    lines, place, excuse = text.splitlines(), 0, ""
    while place < len(lines):
        start, line = place, lines[place]
        if line.startswith("```"):
            end = next(number for number in range(start + 1, len(lines)) if lines[number].startswith("```"))
            yield Block(start + 2, line[3:].strip(), tuple(lines[start + 1 : end]), excuse)
            place = end + 1
        elif line.startswith("    ") and (start == 0 or not lines[start - 1].strip()):
            while place < len(lines) and lines[place].startswith("    "):
                place += 1
            yield Block(start + 1, "", tuple(inner[4:] for inner in lines[start:place]), excuse)
        else:
            place += 1
            if line.strip():
                excuse = marker[1] if (marker := _MARKER.fullmatch(line.strip())) else ""
            continue
        excuse = ""


def _logical_lines(block: Block) -> Iterator[tuple[int, str]]:
    """Yield each line joined with its backslash continuations, and the number of its first line."""
    pending, first = "", block.line
    for number, line in enumerate(block.lines, start=block.line):
        first = first if pending else number
        pending += line.removesuffix("\\") if line.endswith("\\") else line
        if not line.endswith("\\"):
            yield first, pending.strip()
            pending = ""
