"""Host memory of a node, and the part that a rank of it may use by default."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

SHARE = 0.5
"""Share of a node's memory for snapshots and all that belongs to them, where no flag sets it."""
_UNLIMITED = 1 << 60
"""Control groups of version 1 say numbers about as large where there is no limit."""


@dataclass(frozen=True)
class NodeMemory:
    """Memory of this node, as far as this process may use it."""

    nbytes: int
    is_limited: bool
    """True if it is the limit of a control group, and not all that the node has."""

    def __str__(self) -> str:
        what = "limit of its control group" if self.is_limited else "memory of its node"
        return f"{self.nbytes / 1e9:.1f} GB ({what})"


def node_memory(root: Path = Path("/")) -> NodeMemory:
    """Returns what the node has, or what the control groups of this process leave of it, whichever is less.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    total = int(psutil.virtual_memory().total)
    limit = min(_limits(root), default=total)
    return NodeMemory(min(total, limit), is_limited=limit < total)


def _limits(root: Path) -> list[int]:
    """Return the limits of this process's control group and of all around it, of versions 2 and 1."""
    limits = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        base, name = root / "sys/fs/cgroup", "memory.max"
        if controllers:
            if "memory" not in controllers.split(","):
                continue
            base, name = base / "memory", "memory.limit_in_bytes"
        folder = base / path.lstrip("/")
        for each in (folder, *folder.parents):
            if each.is_relative_to(base) and (text := _read(each / name)).isdecimal():
                limits.append(int(text))
    return [limit for limit in limits if limit < _UNLIMITED]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
