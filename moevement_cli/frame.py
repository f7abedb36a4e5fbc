"""One frame of ``moevement top``: a run at one moment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, groupby
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from moevement_core.monitoring.watched_run import WatchedRun

SILENT_S = 30.0
"""A run that has written nothing for longer than this, and than many iterations, is said to be silent."""
SILENT_ITERATIONS = 10
MOST_NODES = 12
MOST_RECOVERIES = 5
"""Of more the newest are shown."""
BAR = 72
"""Characters of a recovery's bar."""
SHADES = (("█", "yellow"), ("▓", "red"), ("▒", "magenta"), ("░", "blue"), ("▚", "cyan"), ("▄", "green"))
"""Of its parts, in their order: told apart without colors, too."""
UNKNOWN = "-"


@dataclass
class Node:
    """Who is on it."""

    name: str
    ranks: list[int] = field(default_factory=list)
    spares: int = 0


def nodes_of(watched: WatchedRun) -> list[Node]:
    """In the order of their ranks; those that have only spares last."""
    nodes: dict[str, Node] = {}
    for process in watched.processes:
        node = nodes.setdefault(name := process.get("node", process["host"]), Node(name))
        if process["role"] == "active":
            node.ranks.append(process["rank"])
        else:
            node.spares += 1
    return list(nodes.values())


def state_of(watched: WatchedRun, now: float) -> str:
    """In words.

    Args:
        watched: the run.
        now: seconds since the epoch.
    """
    figures, active = watched.figures, sum(its["role"] == "active" for its in watched.processes)
    if watched.has_ended:
        return "ended"
    if not figures.iterations:
        return "starting"
    silent_s = now - figures.line.get("time", now)
    patience_s = max(SILENT_S, SILENT_ITERATIONS * (figures.line.get("iteration_s") or 0.0))
    silence = f"nothing written for {_duration(silent_s)}" if silent_s > patience_s else ""
    if watched.processes and figures.world_size is not None and active < figures.world_size:
        missing = figures.world_size - active
        return f"recovering: {missing} of {figures.world_size} ranks missing" + (f", {silence}" if silence else "")
    return silence or "training"


def frame(watched: WatchedRun, now: float) -> RenderableType:
    """All of it.

    Args:
        watched: the run, as of its last update.
        now: seconds since the epoch.
    """
    line = watched.figures.line
    parts: list[RenderableType] = [
        Text.assemble((str(watched.record.folder), "bold"), "  ", _colored(state_of(watched, now))),
        Text(),
        _facts(_training(watched, line)),
        Text(),
        _facts(_checkpoints(line)) if "window" in line else Text("nothing is saved of it every iteration", "dim"),
        Text(),
        _nodes(nodes_of(watched)),
        Text(),
        _recoveries(watched.figures.recoveries, now),
    ]
    return Group(*parts)


def _colored(state: str) -> Text:
    return Text(state, "green" if state in ("training", "ended") else "yellow" if state == "starting" else "bold red")


def _facts(facts: Sequence[tuple[str, str]]) -> Table:
    """Names above values."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name, _ in facts:
        table.add_column(name)
    table.add_row(*(value for _, value in facts))
    return table


def _training(watched: WatchedRun, line: Mapping[str, Any]) -> list[tuple[str, str]]:
    total = watched.train_iterations
    effective = watched.figures.effective
    return [
        ("iteration", f"{line.get('iteration', UNKNOWN)}" + (f"/{total}" if total is not None else "")),
        ("loss", _number(line.get("loss"), "{:.4f}")),
        ("grad norm", _number(line.get("grad_norm"), "{:.3f}")),
        ("iter. time", _number(line.get("iteration_s"), "{:.3f} s")),
        ("tokens/s", _number(line.get("tokens_per_s"), "{:,.0f}")),
        ("ETTR", _number(effective, "{:.1%}")),
        ("recoveries", str(len(watched.figures.recoveries))),
    ]


def _checkpoints(line: Mapping[str, Any]) -> list[tuple[str, str]]:
    persisted, on_disk = line.get("persisted_from"), line.get("on_disk")
    return [
        ("window", str(line["window"])),
        ("persisted", "nothing" if persisted is None else f"from {persisted}"),
        ("lag", f"{line.get('replication_lag', UNKNOWN)}"),
        ("under way", str(line.get("copies_under_way", UNKNOWN))),
        ("snapshots", _size(line.get("snapshot_memory_bytes"))),
        ("log", _size(line.get("log_memory_bytes"))),
        ("on disk", "nothing" if on_disk is None else f"to {on_disk}, {_size(line.get('disk_written_bytes'))}"),
    ]


def _nodes(nodes: Sequence[Node]) -> Table:
    table = Table("node", "ranks", "spares", box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for node in nodes[:MOST_NODES]:
        table.add_row(node.name, ", ".join(ranges(node.ranks)) or UNKNOWN, str(node.spares))
    if others := nodes[MOST_NODES:]:
        ranks, spares = sum(len(node.ranks) for node in others), sum(node.spares for node in others)
        table.add_row(f"{len(others)} more", f"{ranks} ranks", str(spares))
    return table


def _recoveries(recoveries: Sequence[Mapping[str, Any]], now: float) -> RenderableType:
    if not recoveries:
        return Text("no failure so far", "dim")
    newest = recoveries[: -MOST_RECOVERIES - 1 : -1]
    return Group(*(line for recovery in newest for line in _recovery(recovery, now)))


def _recovery(recovery: Mapping[str, Any], now: float) -> Iterator[Text]:
    """What failed, seconds by part, and the same as a bar."""
    who = "; ".join([*recovery.get("earlier", ()), *recovery["failures"]]) or "all ranks restarted"
    ago = _duration(max(0.0, now - recovery["resumed_at"]))
    yield Text.assemble(
        (f"recovery {recovery['generation']}", "bold"), f", {ago} ago, {recovery['total_s']:.2f} s: {who}"
    )
    parts, bar = Text("  "), Text("  ")
    for (part, seconds), (shade, color) in zip(recovery["parts"].items(), cycle(SHADES), strict=False):
        parts.append(f"{shade} ", color).append(f"{part} {seconds:.2f}  ")
        share = seconds / recovery["total_s"] if recovery["total_s"] else 0.0
        bar.append(shade * round(BAR * share), color)
    yield parts
    yield bar


def ranges(numbers: Sequence[int]) -> Iterator[str]:
    """Numbers in rising order, those in a row as ``3-7``."""
    for _, row in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in row]
        yield f"{members[0]}-{members[-1]}" if len(members) > 1 else str(members[0])


def _number(value: Any, form: str) -> str:
    """One that JSON has no word for is there by its name."""
    if value is None:
        return UNKNOWN
    return value if isinstance(value, str) else form.format(value)


def _size(nbytes: float | None) -> str:
    if nbytes is None:
        return UNKNOWN
    unit, name = next(((unit, name) for unit, name in ((1e9, "GB"), (1e6, "MB")) if nbytes >= unit), (1e3, "kB"))
    return f"{nbytes / unit:,.1f} {name}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes, _ = divmod(int(seconds), 60)
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h" if minutes < 48 * 60 else f"{minutes // 60 // 24} d"
