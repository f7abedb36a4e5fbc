"""``moevement report --html``: runs as one page that needs nothing else, to be kept or sent."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from moevement_cli.elements import Element, document, element, table
from moevement_cli.line_chart import Chart, Line, Mark, Point
from moevement_cli.plan_measured import Compared, Row, compare
from moevement_cli.recovery_chart import recovery_chart
from moevement_core.errors import ConfigError, RunRecordError
from moevement_core.monitoring.figures import WARNING_EVENTS, RunFigures
from moevement_core.run_record import RunRecord

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Of runs; told apart also by those who see few colors (Okabe and Ito)."""
MOST_RECOVERIES = 100
"""Of one run that are drawn; of more the newest."""
UNKNOWN = "\N{EN DASH}"
STYLE = """
:root { color-scheme: light dark; --text: #1f2328; --soft: #59636e; --line: #d1d9e0; --back: #ffffff; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6edf3; --soft: #9198a1; --line: #3d444d; --back: #0d1117; }
  .line, .mark, rect, .swatch { filter: brightness(1.4); }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 82rem; margin: 0 auto; padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; } p { margin: .3rem 0; }
.soft, .none, figcaption, caption { color: var(--soft); }
.scrolls { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding: .5rem 0; }
th, td { text-align: left; padding: .25rem 1.25rem .25rem 0; border-bottom: 1px solid var(--line); }
th { font-weight: 600; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 1rem 2rem; }
figure { margin: 0; min-width: 0; }
svg { display: block; width: 100%; height: auto; }
figure.recoveries { overflow-x: auto; } figure.recoveries svg { min-width: 44rem; }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
svg .who { fill: var(--text); }
.y.tick { text-anchor: end; } .x.tick { text-anchor: middle; } .x.label { text-anchor: end; }
.grid { stroke: var(--line); stroke-width: 1; } .mark { stroke-width: 1.5; stroke-dasharray: 2 3; opacity: .8; }
.line { fill: none; stroke-width: 1.6; stroke-linejoin: round; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .1rem 1.2rem; margin: .3rem 0; padding: 0; }
.swatch { display: inline-block; width: 1.6rem; vertical-align: middle; }
code { font-size: .9em; }
"""


class _Run:
    """What of a run is drawn."""

    def __init__(self, record: RunRecord, color: str) -> None:
        self.record, self.color = record, color
        self.name = record.folder.resolve().name
        self.lines, self.events = record.metrics(), record.events()
        if not self.lines:
            raise RunRecordError(f"{record.folder}: no metrics; give the --run-dir of a run that has begun to train")
        self.summary = record.summary() if record.summary_path.exists() else {}
        self.recoveries = [event for event in self.events if event["event"] == "failure"]
        self.figures, self.effective = RunFigures(), list[Point]()
        for line in self.lines:
            self.figures.take_line(line)
            ratio = self.figures.effective
            self.effective.append((line["iteration"], math.nan if ratio is None else ratio))

    def series(self, *names: str) -> list[Point]:
        """The sum of these fields, by iteration; where one is missing there is a gap."""
        return [(line["iteration"], sum(_number(line.get(name)) for name in names)) for line in self.lines]

    def line(self, points: Sequence[Point], label: str = "", *, is_dashed: bool = False) -> Line:
        """In the color of the run."""
        return Line(f"{self.name}{label}", self.color, points, is_dashed)

    def marks(self) -> list[Mark]:
        """Where recoveries are among the iterations."""
        marks = []
        for recovery in self.recoveries:
            before = [line["iteration"] for line in self.lines if line.get("time", math.inf) <= recovery["resumed_at"]]
            text = f"{self.name}: recovery {recovery['generation']}, {recovery['total_s']:.2f} s"
            marks.append(Mark(max(before, default=self.lines[0]["iteration"]), self.color, text))
        return marks


def write_page(records: Sequence[RunRecord], path: Path) -> None:
    """Write the page of ``records`` to ``path``; its folders are made.

    Raises:
        ConfigError: it cannot be written.
        RunRecordError: one of them is no run, or is damaged.
    """
    text = page(records)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {path}: {error.strerror}; give a file that can be written") from None


def page(records: Sequence[RunRecord]) -> str:
    """The whole page, as HTML.

    Raises:
        RunRecordError: one of ``records`` is no run, or is damaged.
    """
    runs = [_Run(record, color) for record, color in zip(records, cycle(COLORS), strict=False)]
    title = ", ".join(run.name for run in runs)
    return document(
        f"{title} \N{MIDDLE DOT} moevement",
        STYLE,
        element("h1", title),
        _summary(runs),
        element("section", element("h2", "Training"), _charts(runs), class_="training"),
        *(section for run in runs for section in _sections(run, is_alone=len(runs) == 1)),
    )


def _summary(runs: Sequence[_Run]) -> Element:
    head = (
        "run", "state", "iterations", "loss", "validation", "iteration time", "tokens/s", "effective time",
        "recoveries", "state digest",
    )  # fmt: skip
    return table(head, [[element("code", str(run.record.folder)), *_facts(run)] for run in runs])


def _facts(run: _Run) -> Iterator[str]:
    last, summary = run.lines[-1], run.summary
    # The first iteration warms caches and pools, so it says nothing of the others.
    durations = [line["iteration_s"] for line in run.lines[1:] if line.get("iteration_s")]
    rates = [line["tokens_per_s"] for line in run.lines[1:] if line.get("tokens_per_s")]
    effective = run.figures.effective
    yield "ended" if summary else "did not come to its end yet"
    yield str(last["iteration"])
    yield _decimal(last.get("loss"))
    yield _decimal(summary.get("validation_loss"))
    yield f"{statistics.median(durations):.3f} s" if durations else UNKNOWN
    yield f"{statistics.median(rates):,.0f}" if rates else UNKNOWN
    yield UNKNOWN if effective is None else f"{effective:.1%}"
    yield str(len(run.recoveries))
    yield str(summary.get("state_digest", {}).get("all", UNKNOWN))[:16]


def _charts(runs: Sequence[_Run]) -> Element:
    marks = [mark for run in runs for mark in run.marks()]
    memory = ("snapshot_memory_bytes", "log_memory_bytes")
    is_alone = len(runs) == 1
    charts = (
        Chart("training loss", [run.line(run.series("loss")) for run in runs], marks, from_zero=False),
        Chart("iteration time", [run.line(run.series("iteration_s")) for run in runs], marks, "seconds"),
        Chart("effective training time ratio", [run.line(run.effective) for run in runs], marks),
        Chart(
            "host memory of the rank that records",
            [run.line(run.series(*memory)) for run in runs]
            if not is_alone
            else [
                Line("snapshots", COLORS[0], runs[0].series(memory[0])),
                Line("boundary log", COLORS[1], runs[0].series(memory[1])),
            ],
            marks, "bytes",
        ),
        Chart(
            "traffic of an iteration",
            [
                line
                for run in runs
                for line in (
                    run.line(run.series("replicated_bytes"), ", sent to peers"),
                    run.line(run.series("copied_bytes"), ", copied to the host", is_dashed=True),
                )
            ],
            marks, "bytes",
        ),
        Chart("training that waited for a copy", [run.line(run.series("stall_s")) for run in runs], marks, "seconds"),
    )  # fmt: skip
    return element("div", *(chart.draw() for chart in charts), class_="charts")


def _sections(run: _Run, *, is_alone: bool) -> Iterator[Element]:
    of = "" if is_alone else f" of {run.name}"
    if run.recoveries:
        newest = run.recoveries[-MOST_RECOVERIES:]
        left_out = len(run.recoveries) - len(newest)
        note = f"The newest {len(newest)} of {len(run.recoveries)}; " if left_out else ""
        yield element(
            "section", element("h2", f"Recoveries{of}"),
            element("p", f"{note}from the failure to the resumption of training, by part.".capitalize(), class_="soft"),
            recovery_chart(newest), _accounts(newest), class_="recoveries",
        )  # fmt: skip
    if compared := list(compare(run.lines, run.events)):
        yield element("section", element("h2", f"Plan against measured{of}"), *map(_compared, compared), class_="plan")
    if warnings := [event for event in run.events if event["event"] in WARNING_EVENTS]:
        rows = [[event["event"].replace("_", " "), str(event.get("text") or event.get("reason"))] for event in warnings]
        yield element("section", element("h2", f"Warnings{of}"), table(("what", ""), rows), class_="warnings")


def _accounts(recoveries: Sequence[dict[str, Any]]) -> Element:
    rows = [
        [
            str(event["generation"]), event["noticed_by"].removeprefix("by "), event["scope"],
            UNKNOWN if event["recovery"] is None else str(event["recovery"]["replayed"]), event["kept"],
            event["copies"], str(event["spares"]),
        ]
        for event in recoveries
    ]  # fmt: skip
    head = ("recovery", "noticed by", "scope", "iterations replayed", "kept", "copies", "spares left")
    return element("details", element("summary", "What each found and did"), table(head, rows))


def _compared(compared: Compared) -> Element:
    caption = (
        f"{compared.strategy}, a window of {compared.window} iterations, in iterations {compared.first + 1} to "
        f"{compared.last}; of the rank that records"
    )
    rows = [[row.what, _shown(row.planned, row), _shown(row.measured, row)] for row in compared.rows]
    return table(("", "planned", "measured"), rows, caption)


def _shown(value: float | None, row: Row) -> str:
    if value is None:
        return UNKNOWN
    return f"{value / 1e6:,.2f} MB" if row.unit == "bytes" else f"{value:g}"


def _number(value: Any) -> float:
    """One that JSON has no word for is there by its name; what is missing is none."""
    return math.nan if value is None else float(value)


def _decimal(value: Any) -> str:
    return UNKNOWN if value is None else f"{float(value):.4f}"
