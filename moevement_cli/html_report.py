"""Report of ``moevement report --html``: runs on one page without external files, to be kept or sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

from moevement_cli.colors import RUN_COLORS, RUN_DASHES
from moevement_cli.elements import Element, document, element, rows_table, table
from moevement_cli.line_chart import Chart, ChartMark, Curve, Point
from moevement_cli.overhead_chart import bar_share, overhead_chart
from moevement_cli.plan_measured import Compared, Row, compare
from moevement_cli.recovery_chart import recovery_chart
from moevement_cli.run_facts import DIGEST_LENGTH, UNKNOWN, RunFacts, headline
from moevement_cli.run_plot import failure_text
from moevement_cli.saving_costs import view
from moevement_core.errors import ConfigError
from moevement_core.overhead.estimate import CONFIDENCE
from moevement_core.run.events import Corrupted, LossSpiked, SlowPlaceFound
from moevement_core.run.figures import WARNING_EVENTS

MOST_RECOVERIES = 100
"""Maximum number of recoveries drawn per run; the newest are drawn."""
MEMORY = ("snapshot_memory_bytes", "log_memory_bytes")
STYLE = """
:root { color-scheme: light dark; --text: #1f2328; --soft: #59636e; --line: #d1d9e0; --back: #ffffff; }
@media screen and (prefers-color-scheme: dark) {
  :root { --text: #e6edf3; --soft: #9198a1; --line: #3d444d; --back: #0d1117; }
  .line, .mark, .mark-label, .span, .band { filter: brightness(1.4); }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 82rem; margin: 0 auto; padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; } h2 { font-size: 1.25rem; margin: 2.2rem 0 .5rem; }
h3 { font-size: 1.05rem; margin: 1.4rem 0 .3rem; } p { margin: .3rem 0; }
.soft, .none, figcaption, caption { color: var(--soft); }
.scrolls { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding: .5rem 0; }
th, td { text-align: left; padding: .25rem 1.25rem .25rem 0; border-bottom: 1px solid var(--line); }
th, td { vertical-align: top; }
th { font-weight: 600; } td, code { overflow-wrap: break-word; }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .1rem 1rem; margin: .5rem 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1.2rem 2rem; }
figure { margin: 0; min-width: 0; }
figure > svg { display: block; width: 100%; height: auto; max-width: 46rem; }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif; } svg .mark-label { fill: var(--text); }
.y.tick { text-anchor: end; } .x { text-anchor: middle; }
.grid { stroke: var(--line); stroke-width: 1; } .mark { stroke-width: 1.5; stroke-dasharray: 2 3; }
.span { opacity: .22; } .band { opacity: .18; stroke: none; }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .1rem 1.2rem; margin: .3rem 0; padding: 0; }
.legend li { white-space: nowrap; } .chart .legend li { white-space: normal; }
.swatch { display: inline-block; width: 1.6rem; vertical-align: middle; } svg.swatch { height: .4rem; }
.recovery { margin: .8rem 0; break-inside: avoid; }
.bar { display: flex; height: 1.5rem; font-size: .8rem; }
.part { min-width: 2px; overflow: hidden; text-align: center; line-height: 1.5rem; }
summary { cursor: pointer; color: var(--soft); }
code { font-size: .9em; }
@media print {
  :root { color-scheme: light; } main { max-width: none; padding: 0; } body { font-size: 11px; }
  .scrolls { overflow: visible; } figure, tr, table, dl { break-inside: avoid; } h2, h3 { break-after: avoid; }
  .charts { grid-template-columns: 1fr 1fr; } .numbers { display: none; }
  .line, .part, .swatch, .span, .band { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""


class _Drawn:
    """Lines and marks of one run, in the color of the run."""

    def __init__(self, facts: RunFacts, color: str, dashes: str) -> None:
        self.facts, self.color, self.dashes = facts, color, dashes
        self.name = facts.name

    def line(self, points: Sequence[Point], label: str = "", dashes: str | None = None) -> Curve:
        """Return a curve in the color of the run, with ``dashes`` in place of the run's dashes if they are given."""
        return Curve(f"{self.name}{label}", self.color, points, self.dashes if dashes is None else dashes)

    def series(self, *names: str) -> Curve:
        """Return a line of the sum of the named metrics, over iterations."""
        return self.line(self.facts.series(*names))

    def saving(self) -> Curve:
        """Return the line of the overhead of saving in percent of training, with its confidence interval."""
        costs = self.facts.saving_costs
        return replace(self.line(costs.points()), band=costs.intervals())

    def marks(self) -> list[ChartMark]:
        """Return a mark at the iteration of each recovery, slow place, corruption and loss spike."""
        recoveries = [
            ChartMark(self.facts.iteration_at(recovery), self.color, self._sentence(recovery), _label(recovery))
            for recovery in self.facts.recoveries
        ]
        warnings = [
            ChartMark(event["iteration"], self.color, f"{self.name}: {event['text']}", _LABELS[event["event"]](event))
            for event in self.facts.events
            if event["event"] in _LABELS
        ]
        return [*recoveries, *warnings]

    def spans(self) -> list[ChartMark]:
        """Return a span for each recovery, in seconds since the first iteration began."""
        ends = [self.facts.elapsed_s(recovery["resumed_at"]) for recovery in self.facts.recoveries]
        return [
            ChartMark(end - recovery["total_s"], self.color, self._sentence(recovery), _label(recovery), until=end)
            for end, recovery in zip(ends, self.facts.recoveries, strict=True)
        ]

    def _sentence(self, recovery: dict[str, Any]) -> str:
        return f"{self.name}: recovery {recovery['generation']}, {recovery['total_s']:.2f} s"


def _corruption_label(event: dict[str, Any]) -> str:
    named = "rank" if len(event["ranks"]) == 1 else "ranks"
    return f"{named} {', '.join(map(str, event['ranks']))} computed something wrong"


def _slow_label(event: dict[str, Any]) -> str:
    named = "rank" if len(event["ranks"]) == 1 else "ranks"
    return f"{named} {', '.join(map(str, event['ranks']))} slow, {event['factor']:.2f} x"


def _spike_label(event: dict[str, Any]) -> str:
    return "loss spike, the job goes back" if event["rolls_back"] else "loss spike"


_LABELS = {SlowPlaceFound.kind: _slow_label, Corrupted.kind: _corruption_label, LossSpiked.kind: _spike_label}
"""Functions that label a warning in the charts, by kind of its event."""


def _label(recovery: dict[str, Any]) -> str:
    return f"{failure_text(recovery)}, {recovery['total_s']:.1f} s"


def write_page(runs: Sequence[RunFacts], path: Path) -> None:
    """Write the page of ``runs`` to ``path``.

    Raises:
        ConfigError: the file cannot be written.
        RunRecordError: the configuration of a run is damaged.
    """
    text = page(runs)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {path}: {error.strerror}; give a file that can be written") from None


def page(runs: Sequence[RunFacts]) -> str:
    """Return the whole page as HTML text.

    Raises:
        RunRecordError: the configuration of a run is damaged.
    """
    full_width = max((bar_share(run.saving_costs.newest) for run in runs if run.saving_costs.newest), default=0.0)
    drawn = [_Drawn(*look) for look in zip(runs, cycle(RUN_COLORS), cycle(RUN_DASHES), strict=False)]
    names = ", ".join(run.name for run in runs)
    return document(
        f"{headline(runs)} \N{MIDDLE DOT} {names} \N{MIDDLE DOT} moevement",
        STYLE,
        element("h1", headline(runs)),
        _listed([("runs", names), *_common(runs)]),
        _summary(runs),
        element("section", element("h2", "Training"), *_charts(drawn), class_="training"),
        *(element("section", element("h2", run.name), *_about(run, full_width), class_="run") for run in runs),
    )


def _common(runs: Sequence[RunFacts]) -> Iterator[tuple[str, str]]:
    """Yield the facts that all runs share, and the date of the first run."""
    first, *others = (run.origin() for run in runs)
    for name, value in first:
        if name == "date" or all((name, value) in origin for origin in others):
            yield name, value


def _listed(facts: Sequence[tuple[str, str]]) -> Element:
    return element("dl", *(part for name, value in facts for part in (element("dt", name), element("dd", value))))


def _summary(runs: Sequence[RunFacts]) -> Element:
    """Return a table of facts. Each run is a column, so that a page of two runs fits the screen of a phone."""
    facts = [dict(_facts(run, runs[0])) for run in runs]
    return rows_table(["run", *(run.name for run in runs)], [[name, *(of[name] for of in facts)] for name in facts[0]])


def _facts(run: RunFacts, first: RunFacts) -> Iterator[tuple[str, str]]:
    effective, digest = run.figures.effective, run.digest
    yield "state", run.state
    yield "iterations", str(run.lines[-1]["iteration"])
    yield "loss", _decimal(run.lines[-1].get("loss"))
    yield "validation loss", _decimal(run.summary.get("validation_loss"))
    yield "iteration time", UNKNOWN if run.iteration_s is None else f"{run.iteration_s:.3f} s"
    yield "tokens/s", UNKNOWN if run.tokens_per_s is None else f"{run.tokens_per_s:,.0f}"
    yield "saving costs", ": ".join(filter(None, (run.saving_costs.text(), run.saving_costs.reason_text)))
    yield "ETTR", UNKNOWN if effective is None else f"{effective:.1%}"
    yield "recoveries", str(len(run.recoveries))
    yield "time lost", f"{run.lost_s:.2f} s"
    is_same = run is not first and digest is not None and digest == first.digest
    yield "state digest", f"the same as {first.name}" if is_same else (digest or UNKNOWN)[:DIGEST_LENGTH]


def _charts(runs: Sequence[_Drawn]) -> Iterator[Element]:
    """Yield charts of quantities that changed during training, and a table of quantities that stayed constant."""
    every = list(_all_charts(runs))
    yield element("div", *(chart.draw() for chart in every if not chart.is_constant), class_="charts")
    if constant := [chart for chart in every if chart.is_constant]:
        rows = [[chart.title, *value] for chart in constant for value in chart.values()]
        yield element("h3", "About the same in every iteration")
        yield table(("quantity", "of", "value"), rows)


def _all_charts(runs: Sequence[_Drawn]) -> Iterator[Chart]:
    marks, spans = [mark for run in runs for mark in run.marks()], [span for run in runs for span in run.spans()]
    first, *others = runs
    elapsed = "seconds since the first iteration began"
    same = [run.name for run in others if run.facts.series("loss") == first.facts.series("loss")]
    note = f"{' and '.join(same)}: identical to {first.name} in every iteration." if same else ""
    yield Chart(
        "committed iterations over time", [run.line(run.facts.progress()) for run in runs], spans, x_label=elapsed
    )
    yield Chart("training loss", [run.series("loss") for run in runs], marks, from_zero=False, note=note)
    yield Chart("iteration time", [run.series("iteration_s") for run in runs], marks, "seconds")
    yield Chart(
        "effective training time ratio", [run.line(run.facts.effective) for run in runs], spans, from_zero=False,
        x_label=elapsed,
    )  # fmt: skip
    yield Chart("gradient norm", [run.series("grad_norm") for run in runs], marks)
    memory = [run.series(*MEMORY) for run in runs]
    if not others:
        parts = ("snapshots", "boundary log")
        memory = [
            Curve(part, color, first.facts.series(name))
            for part, color, name in zip(parts, RUN_COLORS, MEMORY, strict=False)
        ]
    yield Chart("host memory of the rank that records", memory, marks, "bytes", steady=0.1)
    traffic = {"replicated_bytes": ", sent to peers", "copied_bytes": ", copied to the host"}
    yield Chart(
        "traffic of an iteration",
        [
            run.line(run.facts.series(name), label, "6 5" if name == "copied_bytes" else "")
            for run in runs
            for name, label in traffic.items()
        ],
        marks, "bytes",
    )  # fmt: skip
    costs = [run.facts.saving_costs for run in runs]
    yield Chart(
        "what saving costs", [run.saving() for run in runs], marks, "% of training", view=view(costs),
        note=f"The band is the {CONFIDENCE:.0%} confidence interval.",
    )  # fmt: skip
    yield Chart("wait of training for a copy", [run.series("stall_s") for run in runs], marks, "seconds")


def _about(run: RunFacts, full_width: float) -> Iterator[Element]:
    """Yield the parts of the page about one run.

    Args:
        run: the run.
        full_width: overhead, as a share of training time, at which a bar fills the width of the page.
    """
    facts = [("folder", str(run.record.folder)), *run.origin(), ("failures", run.failures)]
    yield _listed(facts)
    if (overhead := run.saving_costs.newest) is not None:
        chart = overhead_chart(overhead, full_width or 1.0)
        yield element("section", element("h3", "What saving costs"), chart, class_="saving")
    if run.recoveries:
        newest = run.recoveries[-MOST_RECOVERIES:]
        left_out = len(run.recoveries) - len(newest)
        note = f"The newest {len(newest)} of {len(run.recoveries)}; " if left_out else ""
        yield element(
            "section", element("h3", "Recoveries"),
            element("p", f"{note}from the failure to the resumption of training, by part.".capitalize(), class_="soft"),
            recovery_chart(newest), class_="recoveries",
        )  # fmt: skip
    if compared := list(compare(run.lines, run.events)):
        yield element("section", element("h3", "Planned and measured"), *map(_compared, compared), class_="plan")
    if warnings := [event for event in run.events if event["event"] in WARNING_EVENTS]:
        rows = [[event["event"].replace("_", " "), str(event.get("text") or event.get("reason"))] for event in warnings]
        yield element("section", element("h3", "Warnings"), table(("what", ""), rows), class_="warnings")


def _compared(compared: Compared) -> Element:
    caption = (
        f"Last rank, W = {compared.window}, strategy {compared.strategy}, iterations {compared.first + 1} to "
        f"{compared.last}"
    )
    rows = [[row.what, _shown(row.planned, row), _shown(row.measured, row)] for row in compared.rows]
    return table(("", "planned", "measured"), rows, caption)


def _shown(value: float | None, row: Row) -> str:
    if value is None:
        return UNKNOWN
    return f"{value / 1e6:,.2f} MB" if row.unit == "bytes" else f"{value:g}"


def _decimal(value: Any) -> str:
    return UNKNOWN if value is None else f"{float(value):.4f}"
