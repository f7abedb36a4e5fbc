"""Recorded traces of clusters of preemptible instances, whose nodes come and go."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from moevement_core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Change:
    """Nodes that joined and nodes that left a cluster at one moment."""

    at_s: float
    added: frozenset[str] = frozenset()
    removed: frozenset[str] = frozenset()


def changes(trace: Path) -> list[Change]:
    """Read a recorded trace. Each line has milliseconds, ``add`` or ``remove``, and the name of a node.

    Raises:
        ConfigError: a line has another form.
    """
    at: dict[float, tuple[set[str], set[str]]] = {}
    with trace.open(newline="", encoding="utf-8") as file:
        for number, row in enumerate(csv.reader(file), start=1):
            if len(row) != 3 or row[1] not in ("add", "remove") or not row[0].isdecimal():
                raise ConfigError(
                    f"{trace}, line {number}: {','.join(row)!r}; "
                    "needs the form milliseconds,add,node or milliseconds,remove,node"
                )
            at.setdefault(int(row[0]) / 1000.0, (set(), set()))[row[1] == "remove"].add(row[2])
    return [Change(at_s, frozenset(added), frozenset(removed)) for at_s, (added, removed) in sorted(at.items())]


def segment(trace: Sequence[Change], begin_s: float, end_s: float, most: int) -> tuple[list[str], list[Change]]:
    """Return a segment of a trace, limited to a cluster of ``most`` nodes.

    Once the cluster has ``most`` nodes, further nodes of the trace wait outside. When a node leaves the cluster, the
    node that has waited longest takes its place.

    Args:
        trace: all changes of the trace; before the first change there are no nodes.
        begin_s: beginning of the segment, seconds.
        end_s: end of the segment, seconds.
        most: largest number of nodes of the cluster.

    Returns:
        The names of the nodes at ``begin_s``, and the changes after ``begin_s``, in seconds since ``begin_s``.
    """
    present: list[str] = []
    waiting: list[str] = []
    later: list[Change] = []
    first: list[str] | None = None
    for change in trace:
        if change.at_s > begin_s and first is None:
            first = list(present)
        before = set(present)
        present = [node for node in present if node not in change.removed]
        waiting = [node for node in waiting if node not in change.removed] + sorted(change.added - set(present))
        while waiting and len(present) < most:
            present.append(waiting.pop(0))
        if begin_s < change.at_s <= end_s and set(present) != before:
            later.append(
                Change(change.at_s - begin_s, frozenset(set(present) - before), frozenset(before - set(present)))
            )  # fmt: skip
    return (present if first is None else first), later


def nodes_over_time(
    first: Sequence[str], trace: Sequence[Change], until_s: float
) -> Iterator[tuple[float, float, int]]:
    """Yield the start, the end (in seconds) and the number of nodes of each period between two changes."""
    present, begin_s = set(first), 0.0
    for change in trace:
        yield begin_s, change.at_s, len(present)
        present = (present | change.added) - change.removed
        begin_s = change.at_s
    yield begin_s, until_s, len(present)
