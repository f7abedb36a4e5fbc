"""Host memory of a node, and the share of that memory that jobs use by default."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

SHARE = 0.5
"""Default share of a node's memory for snapshots, copies, parity and logs of all ranks on the node."""
_UNLIMITED = 1 << 60
"""Smallest number of bytes that means "no limit". Without a limit, version 1 of control groups reports more."""


@dataclass(frozen=True)
class NodeMemory:
    """Memory of this node that this process may use."""

    nbytes: int
    is_limited: bool
    """True if a control group limits the memory to less than the node has."""

    def __str__(self) -> str:
        kind = "limit of its control group" if self.is_limited else "memory of its node"
        return f"{self.nbytes / 1e9:.1f} GB ({kind})"


def node_memory(root: Path = Path("/")) -> NodeMemory:
    """Return the memory of the node, or the limit of this process's control groups if that is less.

    Args:
        root: folder that contains ``proc`` and ``sys``.
    """
    total = int(psutil.virtual_memory().total)
    limit = min(_limits(root), default=total)
    return NodeMemory(min(total, limit), is_limited=limit < total)


def _limits(root: Path) -> list[int]:
    """Return the memory limits, in bytes, of this process's control groups (versions 1 and 2) and their parents."""
    limits = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        base, name = root / "sys/fs/cgroup", "memory.max"
        if controllers:
            if "memory" not in controllers.split(","):
                continue
            base, name = base / "memory", "memory.limit_in_bytes"
        folder = base / path.lstrip("/")
        for group in (folder, *folder.parents):
            if group.is_relative_to(base) and (text := _read(group / name)).isdecimal():
                limits.append(int(text))
    return [limit for limit in limits if limit < _UNLIMITED]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
