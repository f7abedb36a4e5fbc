"""Damage that was found: data in memory, in a file or on the wire that is not what its digest says.

One line in the log of the rank that finds it, in a form that ``moevement drill`` reads back.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from moevement_core import log

_LINE = re.compile(r"damage found by (?P<by>.+?): (?P<what>.+); (?P<instead>.+)")


@dataclass(frozen=True)
class Damage:
    """Report of damage that was found."""

    by: str
    """Which check found it."""
    what: str
    """Data that is damaged."""
    instead: str
    """Reaction to the damage."""

    def __str__(self) -> str:
        return f"damage found by {self.by}: {self.what}; {self.instead}"

    @staticmethod
    def parse(text: str) -> Damage | None:
        """The inverse of ``str``; None for any other line."""
        match = _LINE.fullmatch(text)
        return Damage(**match.groupdict()) if match else None


def report(by: str, what: str, instead: str) -> None:
    """Say in this rank's log that damage was found; from any thread."""
    log.warning(str(Damage(by, what, instead)))
