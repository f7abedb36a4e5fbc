"""Frame of ``moevement top``: a view of a run at one moment, which fits the size of the terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, groupby
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from moevement_cli.flow import columns, facts, flow, shortened
from moevement_cli.run_state import RunState, duration, left_s, missing_ranks, state_of
from moevement_cli.saving_costs import interval, parts_text, percent
from moevement_core.monitoring.watched_run import WatchedRun
from moevement_core.overhead.estimate import CONFIDENCE
from moevement_core.overhead.fields import recorded_overhead
from moevement_core.util.words import counted, spares_words

MOST_RECOVERIES = 5
"""Maximum number of recoveries shown, the newest first."""
BAR = 72
"""Maximum width of a recovery's bar, in characters."""
SHADES = (("█", "yellow"), ("▓", "red"), ("▒", "magenta"), ("░", "blue"), ("▚", "cyan"), ("▄", "green"))
"""Characters and colors of a recovery's parts, in order. Without colors, the characters alone distinguish the parts."""
UNKNOWN = "-"


@dataclass
class Node:
    """Processes of a job on one node."""

    name: str
    ranks: list[int] = field(default_factory=list)
    spares: int = 0
    """Spares that are ready to take over a rank."""
    starting: int = 0
    """Processes that are starting and will become spares."""


def nodes_of(watched: WatchedRun) -> list[Node]:
    """Return the nodes in the order of their ranks. Nodes with only spares come last."""
    nodes: dict[str, Node] = {}
    for process in watched.processes:
        node = nodes.setdefault(name := process.get("node", process["host"]), Node(name))
        if process["role"] == "active":
            node.ranks.append(process["rank"])
        elif process["role"] == "spare":
            node.spares += 1
        else:
            node.starting += 1
    return list(nodes.values())


@dataclass(frozen=True)
class Frame:
    """View of a run at one moment, as lines that fit the width and height of the terminal."""

    watched: WatchedRun
    """Run as of its last update."""
    now: float
    """Time of the view, in seconds since the epoch."""
    hint: str = ""
    """Last line of an interactive terminal, which names the keys."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines of the frame for the console."""
        for line in self.lines(options.max_width, options.height):
            line.no_wrap, line.overflow = True, "crop"
            yield line

    def lines(self, width: int, height: int | None = None) -> list[Text]:
        """Return the lines of the frame.

        If the terminal is not high enough, blank lines are left out first, then older recoveries and nodes.
        """
        head, nodes = self._head(width), list(_nodes(nodes_of(self.watched), width))
        recoveries = [
            list(_recovery(recovery, self.now, width)) for recovery in _newest(self.watched.figures.recoveries)
        ]
        hint = [Text(self.hint, "dim")] if self.hint else []
        every = _below_each_other(head, nodes, recoveries)
        if height is None or len(every) + len(hint) <= height:
            return [*every, *hint]
        head, room = [line for line in head if line.cell_len], height - len(hint)
        left = max(1, room - len(head))
        recoveries = _fitting(recoveries, left - min(len(nodes), left // 2))
        nodes = _cut(nodes, left - max(1, sum(map(len, recoveries))))
        every = [line for line in _below_each_other(head, nodes, recoveries) if line.cell_len]
        return [*every[: max(1, room)], *hint][: max(1, height)]

    def _head(self, width: int) -> list[Text]:
        watched, state = self.watched, state_of(self.watched, self.now)
        lines = [*_title(str(watched.record.folder), state, width), Text(), *facts(self._times(), width)]
        if line := watched.figures.line:
            lines += [Text(), *facts(_training(watched, line), width)]
            if "window" in line:
                lines += [Text(), *facts(_checkpoints(line), width)]
                lines += [Text(), *facts(_saving(line, has_ended=watched.has_ended), width)]
            else:
                lines += [Text(), Text("no sparse checkpoints", "yellow")]
        if not watched.has_ended:
            for text in watched.figures.slow.values():
                lines += [Text(), *_wrapped(text, width, "bold yellow")]
        if not watched.has_ended and (missing := missing_ranks(watched)):
            lines += [Text(), *_wrapped(f"missing ranks: {', '.join(ranges(missing))}", width, "bold red")]
        return lines

    def _times(self) -> list[tuple[str, str]]:
        """Return the clock and the times of the run: duration, age of the last iteration, time left."""
        watched, figures = self.watched, self.watched.figures
        times = [("clock", time.strftime("%H:%M:%S", time.localtime(self.now)))]
        began_at = watched.job.began_at if watched.job is not None else figures.began_at
        ended_at = watched.job.ended_at if watched.job is not None else None
        if began_at is not None and (ended_at is not None or not watched.has_ended):
            name = "up" if ended_at is None else "took"
            times.append((name, duration(max(0.0, (ended_at or self.now) - began_at))))
        if (at := figures.line.get("time")) is not None:
            times.append(("last iteration", f"{duration(max(0.0, self.now - at))} ago"))
        if not watched.has_ended and (left := left_s(watched)) is not None:
            times.append(("time left", duration(left)))
        return times


def _below_each_other(head: list[Text], nodes: list[Text], recoveries: list[list[Text]]) -> list[Text]:
    below = [line for lines in recoveries for line in lines] or [Text("no failure so far")]
    return [*head, *((Text(), *nodes) if nodes else ()), Text(), *below]


def _title(folder: str, state: RunState, width: int) -> Iterator[Text]:
    """Yield the folder of the run and its state, in one line if they fit."""
    if len(folder) + 2 + len(state.text) <= width:
        yield Text.assemble((folder, "bold"), "  ", (state.text, state.style))
        return
    yield Text(shortened(folder, width), "bold")
    yield from _wrapped(state.text, width, state.style)


def _training(watched: WatchedRun, line: Mapping[str, Any]) -> list[tuple[str, str]]:
    total = watched.train_iterations
    return [
        ("iteration", f"{line.get('iteration', UNKNOWN)}" + (f"/{total}" if total is not None else "")),
        ("loss", _number(line.get("loss"), "{:.4f}")),
        ("grad norm", _number(line.get("grad_norm"), "{:.3f}")),
        ("iter. time", _number(line.get("iteration_s"), "{:.3f} s")),
        ("tokens/s", _number(line.get("tokens_per_s"), "{:,.0f}")),
        ("ETTR", _number(watched.figures.effective, "{:.1%}")),
        ("recoveries", str(len(watched.figures.recoveries))),
    ]


def _window(line: Mapping[str, Any]) -> str:
    iterations, snapshots = line["window"], line.get("window_snapshots", line["window"])
    every = f", {counted(snapshots, 'snapshot')}" if snapshots < iterations else ""
    return f"{counted(iterations, 'iteration')}{every}"


def _checkpoints(line: Mapping[str, Any]) -> list[tuple[str, str]]:
    persisted, on_disk = line.get("persisted_from"), line.get("on_disk")
    lag = line.get("replication_lag")
    return [
        ("window", _window(line)),
        ("restore point", "none yet" if persisted is None else f"iteration {persisted}"),
        ("peers behind", UNKNOWN if lag is None else counted(lag, "iteration")),
        ("unsent copies", str(line.get("copies_under_way", UNKNOWN))),
        ("snapshots", _size(line.get("snapshot_memory_bytes"))),
        ("log", _size(line.get("log_memory_bytes"))),
        ("on disk", "nothing" if on_disk is None else f"to {on_disk}, {_size(line.get('disk_written_bytes'))}"),
    ]


def _saving(line: Mapping[str, Any], *, has_ended: bool) -> list[tuple[str, str]]:
    """Return pairs of name and text: the overhead of saving, its confidence interval, its limit, and its parts."""
    overhead = recorded_overhead(line)
    if overhead is None:
        return [("saving costs", "not measured" if has_ended else "not measured yet")]
    return [
        ("saving costs", f"{percent(overhead.share)} of training"),
        (f"{CONFIDENCE:.0%} interval", interval(overhead)),
        *([] if overhead.allowed is None else [("allowed", percent(overhead.allowed))]),
        *parts_text(overhead),
    ]


def _nodes(nodes: Sequence[Node], width: int) -> Iterator[Text]:
    """Yield the numbers of ranks and spares, and the processes of each node."""
    if not nodes:
        return
    ranks = counted(sum(len(node.ranks) for node in nodes), "rank")
    spares = spares_words(sum(node.spares for node in nodes), sum(node.starting for node in nodes))
    yield from flow([Text(f"{ranks} on {counted(len(nodes), 'node')}"), Text(f"spares: {spares}")], width)
    yield from columns([Text(_node(node)) for node in nodes if node.ranks], width)
    yield from flow([Text(_node(node)) for node in nodes if not node.ranks], width)


def _node(node: Node) -> str:
    parts = [", ".join(ranges(node.ranks))] if node.ranks else []
    if node.spares or node.starting or not node.ranks:
        parts.append(f"spares {spares_words(node.spares, node.starting)}")
    return f"{node.name}: {'; '.join(parts)}"


def _newest(recoveries: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    return recoveries[: -MOST_RECOVERIES - 1 : -1]


def _recovery(recovery: Mapping[str, Any], now: float, width: int) -> Iterator[Text]:
    """Yield the failures that caused a recovery, the seconds of its parts, and a bar of the parts."""
    failures = "; ".join([*recovery.get("earlier", ()), *recovery["failures"]]) or "all ranks restarted"
    ago = duration(max(0.0, now - recovery["resumed_at"]))
    yield from _wrapped(
        f"recovery {recovery['generation']}, {ago} ago, {recovery['total_s']:.2f} s: {failures}", width, "bold"
    )
    parts = [
        (part, seconds, *look) for (part, seconds), look in zip(recovery["parts"].items(), cycle(SHADES), strict=False)
    ]
    legend = (Text.assemble((f"{shade} ", color), f"{part} {seconds:.2f}") for part, seconds, shade, color in parts)
    yield from flow(legend, width, indent=2)
    bar = Text("  ")
    cells = _cells([seconds for _, seconds, *_ in parts], max(1, min(BAR, width - 2)))
    for (*_, shade, color), count in zip(parts, cells, strict=True):
        bar.append(shade * count, color)
    yield bar


def _cells(seconds: Sequence[float], width: int) -> list[int]:
    """Return the number of characters of each part of a bar. A part longer than 0 s has at least one character."""
    total = sum(seconds)
    cells = [max(1, round(width * part / total)) if part > 0 else 0 for part in seconds]
    while sum(cells) > width and max(cells) > 1:
        cells[cells.index(max(cells))] -= 1
    return cells


def _fitting(recoveries: Sequence[list[Text]], room: int) -> list[list[Text]]:
    """Return the newest recoveries that fit into ``room`` lines, and in any case the newest one."""
    kept = list(recoveries[:1])
    for lines in recoveries[1:]:
        if sum(map(len, kept)) + len(lines) > room:
            break
        kept.append(lines)
    return kept


def _cut(lines: Sequence[Text], room: int) -> list[Text]:
    """Return at most ``room`` lines. If some are left out, the last returned line says how many."""
    if len(lines) <= room:
        return list(lines)
    kept = max(1, room - 1)
    return [*lines[:kept], Text(f"{counted(len(lines) - kept, 'more line')} of nodes")][: max(1, room)]


def _wrapped(text: str, width: int, style: str) -> Iterator[Text]:
    """Yield a text in lines of at most ``width`` characters. A word longer than ``width`` has a separate line."""
    line = ""
    for word in text.split(" "):
        if line and len(line) + 1 + len(word) > width:
            yield Text(line, style)
            line = "  " + word
        else:
            line = f"{line} {word}" if line else word
    yield Text(line, style)


def ranges(numbers: Sequence[int]) -> Iterator[str]:
    """Yield the numbers in rising order, with consecutive numbers as a range such as ``3-7``."""
    for _, row in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in row]
        yield f"{members[0]}-{members[-1]}" if len(members) > 1 else str(members[0])


def _number(value: Any, form: str) -> str:
    """Return a number as text. A record holds NaN and infinity as strings, which stay as they are."""
    if value is None:
        return UNKNOWN
    return value if isinstance(value, str) else form.format(value)


def _size(nbytes: float | None) -> str:
    if nbytes is None:
        return UNKNOWN
    unit, name = next(((unit, name) for unit, name in ((1e9, "GB"), (1e6, "MB")) if nbytes >= unit), (1e3, "kB"))
    return f"{nbytes / unit:,.1f} {name}"
