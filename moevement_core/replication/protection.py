"""Protection of snapshots against the loss of nodes: copies on other nodes, or parity of groups."""

from __future__ import annotations

import re
from dataclasses import dataclass

from moevement_core.errors import ConfigError

_COPIES, _PARITY = re.compile(r"copies:(\d+)"), re.compile(r"parity:(\d+)\+(\d+)")


@dataclass(frozen=True)
class Parity:
    """Parity scheme: M blocks of parity for each group of G ranks.

    The snapshots of a group survive the loss of any M nodes that hold its ranks or its blocks.
    """

    members: int
    blocks: int

    def __str__(self) -> str:
        return f"parity:{self.members}+{self.blocks}"


@dataclass(frozen=True)
class Protection:
    """Protection that flags set. If they set neither copies nor parity, the job makes the default number of copies."""

    replicas: int | None = None
    parity: Parity | None = None


def protection_of(name: str, text: str | None) -> Protection:
    """Return the protection that ``copies:R`` or ``parity:G+M`` describes.

    Raises:
        ConfigError: ``text`` has neither form.
    """
    if text is None:
        return Protection()
    if match := _COPIES.fullmatch(text):
        return Protection(replicas=int(match[1]))
    if (match := _PARITY.fullmatch(text)) and int(match[1]) > 1 and int(match[2]) > 0:
        return Protection(parity=Parity(int(match[1]), int(match[2])))
    raise ConfigError(f"{name} {text}; needs copies:R, or parity:G+M with G of 2 or more and M of 1 or more")
