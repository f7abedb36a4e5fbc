"""Nodes that come and go, as clusters of preemptible instances have recorded it."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from moevement_core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Change:
    """Nodes that came, and nodes that went, at one moment."""

    at_s: float
    added: frozenset[str] = frozenset()
    removed: frozenset[str] = frozenset()


def changes(trace: Path) -> list[Change]:
    """Read a recorded trace: milliseconds, ``add`` or ``remove``, node.

    Raises:
        ConfigError: it is no such trace.
    """
    at: dict[float, tuple[set[str], set[str]]] = {}
    with trace.open(newline="", encoding="utf-8") as file:
        for number, row in enumerate(csv.reader(file), start=1):
            if len(row) != 3 or row[1] not in ("add", "remove") or not row[0].isdecimal():
                raise ConfigError(f"{trace}, line {number}: {','.join(row)!r}; needs milliseconds,add or remove,node")
            at.setdefault(int(row[0]) / 1000.0, (set(), set()))[row[1] == "remove"].add(row[2])
    return [Change(at_s, frozenset(added), frozenset(gone)) for at_s, (added, gone) in sorted(at.items())]


def segment(trace: Sequence[Change], begin_s: float, end_s: float, most: int) -> tuple[list[str], list[Change]]:
    """A part of a trace on a cluster of ``most`` nodes: who is there at its beginning, and what changes until its end.

    Nodes beyond ``most`` wait, first come, first served, and take the place of one that goes.

    Args:
        trace: from its beginning, where nobody is there.
        begin_s: of the segment, seconds.
        end_s: of the segment.
        most: nodes of the cluster.

    Returns:
        The nodes at ``begin_s``, and the changes after it, whose times count from there.
    """
    there: list[str] = []
    waiting: list[str] = []
    made: list[Change] = []
    first: list[str] | None = None
    for change in trace:
        if change.at_s > begin_s and first is None:
            first = list(there)
        before = set(there)
        there = [node for node in there if node not in change.removed]
        waiting = [node for node in waiting if node not in change.removed] + sorted(change.added - set(there))
        while waiting and len(there) < most:
            there.append(waiting.pop(0))
        if begin_s < change.at_s <= end_s and set(there) != before:
            made.append(
                Change(change.at_s - begin_s, frozenset(set(there) - before), frozenset(before - set(there)))
            )  # fmt: skip
    return (there if first is None else first), made


def nodes_over_time(
    first: Sequence[str], trace: Sequence[Change], until_s: float
) -> Iterator[tuple[float, float, int]]:
    """Begin, end and number of nodes of each stretch without a change."""
    there, begin_s = set(first), 0.0
    for change in trace:
        yield begin_s, change.at_s, len(there)
        there = (there | change.added) - change.removed
        begin_s = change.at_s
    yield begin_s, until_s, len(there)
