"""Report of damaged data: bytes in memory, in a file or on the wire that do not match their digest.

The rank that finds the damage writes one line to its log. ``moevement drill`` parses that line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from moevement_core import log

_LINE = re.compile(r"damage found by (?P<check>.+?): (?P<data>.+); (?P<action>.+)")


@dataclass(frozen=True)
class Damage:
    """Damage that one check found; ``str`` gives it as one line of the log."""

    check: str
    """Name of the check that found the damage."""
    data: str
    """Description of the damaged data."""
    action: str
    """Action that the rank takes instead of using the data."""

    def __str__(self) -> str:
        return f"damage found by {self.check}: {self.data}; {self.action}"

    @staticmethod
    def parse(text: str) -> Damage | None:
        """Return the damage that a log line reports, or None for any other line; the inverse of ``str``."""
        match = _LINE.fullmatch(text)
        return Damage(**match.groupdict()) if match else None


def report(check: str, data: str, action: str) -> None:
    """Log damage as a warning; any thread of the rank that found it may call this function."""
    log.warning(str(Damage(check, data, action)))
