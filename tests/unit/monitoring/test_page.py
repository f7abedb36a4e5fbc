"""Page of ``moevement report --html``: its contents, and its appearance in a headless browser."""

from __future__ import annotations

import errno
import json
import math
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from moevement_cli import recovery_chart
from moevement_cli.colors import RUN_COLORS
from moevement_cli.elements import Element
from moevement_cli.html_report import page
from moevement_cli.line_chart import BOTTOM, HEIGHT, TOP, Chart, ChartMark, Curve, thinned, tick_step
from moevement_cli.main import main
from moevement_cli.overhead_chart import bar_share, overhead_chart
from moevement_cli.plan_measured import compare
from moevement_cli.run_facts import UNKNOWN, RunFacts, read
from moevement_core.overhead.fields import FIELDS, recorded_overhead
from moevement_core.run.events import Planned
from moevement_core.run.run_record import RunRecord
from tests.unit.monitoring import browser
from tests.unit.monitoring.runs import BEGAN_AT, STANDSTILL, append, failure, job, line, recovered_run

VOID = {"meta"}
PARTS = failure().parts()


class Page(HTMLParser):
    """Parser that checks that a page closes all elements in order, and keeps its texts and tables."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.rows: list[list[str]] = []
        self.texts: list[str] = []
        self.headings: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self.open and self.open[-1] in ("h2", "h3"):
            self.headings.append(data)
        if self.open and self.open[-1] in ("td", "th", "code"):
            self.rows[-1].append(data)


def planned(run: RunRecord, **fields: float) -> None:
    defaults: dict[str, float | int | None] = {
        "iteration": 0, "window": 3, "copied_bytes": 900.0, "replicated_bytes": 1800.0, "memory_bytes": 6_000_000,
        "memory_limit_bytes": None, "expected_rollback": 4.5, "most_replayed": 5,
    }  # fmt: skip
    run.event(Planned(strategy="moevement", **defaults | fields))  # type: ignore[arg-type]


@pytest.fixture
def run(tmp_path: Path) -> RunRecord:
    run = recovered_run(tmp_path / "run")
    planned(run)
    return run


def facts(*runs: RunRecord) -> list[RunFacts]:
    return read([run.folder for run in runs])


def test_a_page_has_the_figures_of_its_run(run: RunRecord) -> None:
    parsed = Page(page(facts(run)))
    rows = parsed.rows
    assert dict(rows[:12]) == {
        "run": "run", "state": "ended", "iterations": "10", "loss": "2.0000", "validation loss": UNKNOWN,
        "iteration time": "1.000 s", "tokens/s": "512", "saving costs": "2.0% (1.0% to 3.0%)",
        "ETTR": "62.5%", "recoveries": "1", "time lost": "4.00 s", "state digest": "ab",
    }  # fmt: skip
    plan = rows[rows.index(["planned", "measured"]) + 1 :]
    assert [row[1:] for row in plan[:5]] == [
        ["0.00 MB", "0.00 MB"], ["0.00 MB", "0.00 MB"], ["6.00 MB", "5.00 MB"], ["4", "2"], ["5", "2"],
    ]  # fmt: skip
    assert ["nothing persisted", STANDSTILL.text] in rows
    assert failure().scope in parsed.texts
    assert {job().command, str(run.folder), "moevement 0.1.0, torch 2.13.0"} <= set(parsed.texts)


def test_a_page_begins_with_what_a_reader_wants_to_know(tmp_path: Path) -> None:
    runs = [recovered_run(tmp_path / name) for name in ("first", "second")]
    parsed = Page(page(facts(*runs)))
    title, heading = (text for text in parsed.texts if text.startswith("Equal"))
    assert title.startswith(heading)
    assert re.findall(r"[\d.]+ s\b", heading) == ["4.0 s", "4.0 s"]
    (digests,) = (row[1:] for row in parsed.rows if row[0] == "state digest")
    assert (digests[0], digests[1].split()[-1]) == ("ab", "first")
    assert sum("identical" in text for text in parsed.texts) == 1
    runs[1].metrics_path.write_text(runs[1].metrics_path.read_text().replace("2.9", "2.8"))
    parsed = Page(page(facts(*runs)))
    assert any("second DIFFERS" in text and "iteration 1" in text for text in parsed.texts)
    assert not any("identical" in text for text in parsed.texts)


def test_a_page_asks_for_nothing_else(run: RunRecord) -> None:
    text = page(facts(run, run))
    assert not re.search(r"https?:|url\(|@import|<script|<link|<img|<iframe|<object", text)
    names = {name for _, name, _ in Page(text).attributes}
    assert not names & {"src", "href", "srcset", "data", "xlink:href", "action", "poster"}
    policy = [value for tag, _, value in Page(text).attributes if tag == "meta" and value and "default-src" in value]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_what_a_run_calls_itself_is_text(tmp_path: Path) -> None:
    run = recovered_run(tmp_path / "<script>alert(1);&amp;")
    run.event(failure(2, failures=['rank 0: KeyError: "</title><b>"']))
    parsed = Page(page(facts(run)))
    assert not any(tag in ("script", "b") for tag, _, _ in parsed.attributes)
    assert any("<script>alert(1);&amp;" in text for text in parsed.texts)
    assert any('KeyError: "</title><b>"' in text for text in parsed.texts)


def test_of_several_runs_each_has_its_color_and_sections(tmp_path: Path) -> None:
    runs = [recovered_run(tmp_path / name) for name in ("first", "second")]
    planned(runs[1])
    text = page(facts(*runs))
    assert text.count(f'stroke="{RUN_COLORS[0]}"') >= 4
    assert text.count(f'stroke="{RUN_COLORS[1]}"') >= 4
    parsed = Page(text)
    order = [parsed.headings.index(name) for name in ("Training", "first", "second")]
    assert order == sorted(order)
    sections = [heading.split()[0] for heading in parsed.headings[order[1] + 1 :]]
    assert sections == [
        "What", "Recoveries", "Warnings", "second", "What", "Recoveries", "Planned", "Warnings"
    ]  # fmt: skip


def test_a_run_without_checkpoints_has_a_page(tmp_path: Path) -> None:
    run = RunRecord(tmp_path)
    run.begin({}, first_iteration=1)
    run.metric(iteration=1, loss="nan", time=BEGAN_AT)
    parsed = Page(page(facts(run)))
    assert dict(row for row in parsed.rows if len(row) == 2)["state"] not in ("ended", UNKNOWN)
    assert parsed.attributes.count(("p", "class", "none")) >= 6


def widths_of(chart: Element) -> dict[str, float]:
    """Return the width of each part's bar by its title, in percent of the page's width."""
    bars = [part for part in chart.iter("span") if part.get("class") == "part"]
    matches = {bar.attrib["title"]: re.search(r"width: ([\d.]+)%", bar.attrib["style"]) for bar in bars}
    return {name: float(width[1]) for name, width in matches.items() if width is not None}


def test_bars_of_what_saving_costs_have_one_scale(tmp_path: Path) -> None:
    first, second = recorded_overhead(line(1)), recorded_overhead(line(1, overhead_send=-0.01))
    assert first is not None
    assert second is not None
    whole = {"copies": 20, "digests": 15, "sends": 50, "policy": 5, "stalls": 10}
    assert widths_of(overhead_chart(first, bar_share(first))) == whole
    drawn = overhead_chart(second, bar_share(first))
    del whole["sends"]
    assert widths_of(drawn) == whole
    assert "sends -1.0%" in [item.tail or "".join(item.itertext()).strip() for item in drawn.iter("li")]
    runs = [recovered_run(tmp_path / name) for name in ("first", "second")]
    append(runs[0].metrics_path, line(11, overhead_send=-0.01))
    widths = re.findall(r'width: ([\d.]+)%;[^>]*title="copies"', page(facts(*runs)))
    assert widths == ["20.00", "20.00"]


def test_what_saving_costs_is_drawn_with_its_interval(tmp_path: Path) -> None:
    runs = [recovered_run(tmp_path / name) for name in ("first", "second")]
    append(runs[0].metrics_path, line(11, overhead=0.04, overhead_low=-0.01, overhead_high=0.06))
    drawn = page(facts(*runs))
    assert len(re.findall(r'<polygon [^>]*class="band"', drawn)) == 2
    assert "4 (-1 to 6)" in Page(drawn).texts


def test_a_run_in_which_nothing_was_measured_says_why(tmp_path: Path) -> None:
    run = recovered_run(tmp_path / "run")
    lines = [{name: value for name, value in metrics.items() if name not in FIELDS} for metrics in run.metrics()[:4]]
    run.metrics_path.write_text("".join(f"{json.dumps(metrics)}\n" for metrics in lines))
    (measured,) = facts(run)
    parsed = Page(page([measured]))
    (row,) = [row for row in parsed.rows if row[0] == "saving costs"]
    assert row[1].endswith(measured.saving_costs.reason_text)
    assert 'class="saving"' not in page([measured])


def test_each_plan_is_compared_with_the_iterations_under_it(tmp_path: Path) -> None:
    run = recovered_run(tmp_path)
    planned(run)
    planned(run, iteration=5, window=1, most_replayed=1)
    first, second = compare(run.metrics(), run.events())
    assert [(plan.first, plan.last, plan.window) for plan in (first, second)] == [(0, 5, 3), (5, 10, 1)]
    assert [row.measured for row in second.rows] == [1000, 2000, 5_000_000, 2, 2]
    assert [row.measured for row in first.rows] == [1000, 2000, 5_000_000, None, None]
    assert list(compare(run.metrics(), [])) == []


def test_the_command_writes_it(run: RunRecord, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "folder" / "page.html"
    assert main(["report", str(run.folder), str(run.folder), "--html", str(path)]) == 0
    assert f"page: {path}" in capsys.readouterr().out
    assert path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        (
            ["{}/run", "--html", "/proc/none/page.html"],
            rf"--html /proc/none/page\.html\b.*{os.strerror(errno.ENOENT)}",
        ),
        (["{}/none", "--html", "{}/page.html"], r"{}/none\b.*--run-dir\b"),
    ],
)
def test_what_cannot_be_written_is_one_line_and_two(
    words: list[str], pattern: str, run: RunRecord, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["report", *(word.format(tmp_path) for word in words)])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert re.search(f"^moevement: {pattern.format(re.escape(str(tmp_path)))}", error), error
    assert error.count("\n") == 1


# Charts


def test_a_long_line_keeps_its_peaks() -> None:
    points = [(float(x), math.sin(x)) for x in range(100_000)]
    points[54_321] = (54_321.0, 50.0)
    points[77_777] = (77_777.0, -50.0)
    kept = thinned(points)
    assert len(kept) <= 1200
    assert kept == sorted(kept)
    assert {points[54_321], points[77_777]} <= set(kept)
    assert thinned(points[:1200]) == points[:1200]


@pytest.mark.parametrize(
    ("least", "most", "step"), [(0, 1, 0.2), (0, 10, 2), (0, 11, 5), (1, 150, 50), (2.0, 2.001, 0.0002)]
)
def test_ticks_are_at_round_numbers(least: float, most: float, step: float) -> None:
    assert tick_step(least, most) == pytest.approx(step)


def test_what_is_no_number_is_a_gap() -> None:
    points = [(1, 1.0), (2, 2.0), (3, math.nan), (4, math.inf), (5, 1.0), (6, 3.0)]
    drawn = Chart("loss", [Curve("run", "#000", points)]).draw()
    assert len(drawn.findall(".//polyline")) == 2


def test_a_chart_has_its_numbers_as_a_table_too() -> None:
    points = [(float(x), 2.0 * x) for x in range(1, 1001)]
    chart = Chart(
        "loss", [Curve("run", "#000", points)], [ChartMark(500.0, "#000", "run: recovery 1", "rank 2 killed")]
    )
    drawn = chart.draw()
    rows = [[cell.text for cell in row.findall("td")] for row in drawn.findall(".//tbody/tr")]
    assert rows[0] == ["1", "2"]
    assert rows[-1] == ["1,000", "2,000"]
    assert len(rows) == 25
    svg = drawn.find("svg")
    assert svg is not None
    assert {"run", "2", "2000", "recovery"} <= set(re.findall(r"\w+", svg.attrib["aria-label"]))
    assert "rank 2 killed" in [text.text for text in svg.findall("text")]
    assert {text.text for text in svg.findall("text")} >= {"200", "1,000", "iteration"}


def test_a_band_has_gaps_and_ends_at_the_edge_of_what_is_shown() -> None:
    band = [(1.0, -90.0, 90.0), (2.0, math.nan, math.nan), (3.0, 1.0, 3.0), (4.0, 1.0, 4.0)]
    line = Curve("run", "#000", [(1.0, 2.0), (2.0, 2.5), (3.0, 2.0), (4.0, 2.0)], band=band)
    drawn = Chart("costs", [line], view=(0.0, 4.0)).draw()
    polygons = drawn.findall(".//polygon")
    places = [
        [tuple(map(float, place.split(","))) for place in polygon.attrib["points"].split()] for polygon in polygons
    ]
    assert [len(place) for place in places] == [2, 4]
    heights = [y for _, y in places[0]]
    assert (min(heights), max(heights)) == (TOP, HEIGHT - BOTTOM)
    assert all(TOP < y < HEIGHT - BOTTOM for _, y in places[1])
    rows = [[cell.text for cell in row.findall("td")] for row in drawn.findall(".//tbody/tr")]
    assert rows[0] == ["1", "2 (-90 to 90)"]
    assert rows[1] == ["2", "2.5"]


def test_a_line_below_zero_is_drawn_with_zero() -> None:
    drawn = Chart("costs", [Curve("run", "#000", [(1.0, -2.0), (2.0, -1.0)])]).draw()
    assert {"-2", "0"} <= {text.text for text in drawn.findall(".//text")}


def test_a_chart_that_says_nothing_is_a_number() -> None:
    def chart(*values: float, **fields: float) -> Chart:
        return Chart("memory", [Curve("run", "#000", list(enumerate(values)))], unit="bytes", **fields)  # type: ignore[arg-type]

    assert chart(103e6, 103e6, math.nan).is_constant
    assert chart(103e6, 103e6).values() == [("run", "103 MB")]
    assert chart(0.0, 0.0).is_constant
    assert not chart(100e6, 103e6).is_constant
    assert chart(100e6, 103e6, steady=0.1).is_constant
    assert "103 MB" in chart(100e6, 103e6, steady=0.1).values()[0][1]
    assert not chart(math.nan).is_constant


def test_a_line_that_stays_where_it_is_is_drawn() -> None:
    for value in (0.0, 7.0):
        drawn = Chart("stall", [Curve("run", "#000", [(5, value)])], from_zero=False).draw()
        (polyline,) = drawn.findall(".//polyline")
        assert "nan" not in polyline.attrib["points"]


# In a browser

PLACES = """
const box = element => { const b = element.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; };
return {
  window: [window.innerWidth, document.documentElement.scrollWidth],
  requests: performance.getEntriesByType("resource").length,
  bars: [...document.querySelectorAll(".bar")].map(bar => ({
    frame: box(bar), seconds: bar.textContent,
    parts: [...bar.children].map(part => [getComputedStyle(part).backgroundColor, ...box(part)]),
  })),
  printed: [...document.styleSheets].flatMap(sheet => [...sheet.cssRules]).filter(
    rule => rule.media && rule.media.mediaText === "print" && rule.cssRules.length).length,
  hidden: [...document.querySelectorAll("details:not([open]):not(.numbers)")].length,
  font: Math.min(
    ...[...document.querySelectorAll("figure > svg")].map(svg => 12 * svg.getBoundingClientRect().width / 520)),
  charts: [...document.querySelectorAll("figure > svg")].map(svg => ({
    frame: box(svg),
    texts: [...svg.querySelectorAll("text")].map(text => [text.textContent, ...box(text)]),
    lines: [...svg.querySelectorAll("polyline")].map(box),
    bars: [...svg.querySelectorAll("rect")].map(bar => [bar.getAttribute("fill"), ...box(bar)]),
  })),
};
"""


def rgb(color: str) -> tuple[int, ...]:
    return tuple(int(color[at : at + 2], 16) for at in (1, 3, 5))


@pytest.fixture
def shown(run: RunRecord, tmp_path: Path) -> Path:
    path = tmp_path / "page.html"
    main(["report", str(run.folder), str(recovered_run(tmp_path / "other").folder), "--html", str(path)])
    return path


@pytest.mark.parametrize("width", [1280, 520])
def test_everything_has_its_place_at_any_width(shown: Path, tmp_path: Path, width: int) -> None:
    seen = browser.find(tmp_path).measured(shown, PLACES, width)
    inner, scrolled = seen["window"]
    assert scrolled <= inner, "the page itself never scrolls sideways"
    assert seen["requests"] == 0
    assert len(seen["charts"]) == 3, "all others stay where they are"
    assert seen["font"] > 10, "pixels of a letter"
    assert (seen["printed"], seen["hidden"]) == (1, 0), "nothing is left out on paper but numbers of charts"
    for chart in seen["charts"]:
        left, top, right, bottom = chart["frame"]
        assert right - left > 300
        boxes = [*chart["lines"], *(element[1:] for element in (*chart["texts"], *chart["bars"]))]
        assert boxes
        for a, b, c, d in boxes:
            assert left - 1 <= a <= c <= right + 1, chart
            assert top - 1 <= b <= d <= bottom + 1, chart
        assert all(text for text, *_ in chart["texts"])
    recovery = seen["bars"][-1]
    colors = [tuple(map(int, re.findall(r"\d+", color))) for color, *_ in recovery["parts"]]
    assert colors == [rgb(recovery_chart.COLORS[part]) for part in PARTS]
    widths = [right - left for _, left, _, right, _ in recovery["parts"]]
    assert np.allclose(np.array(widths) / sum(widths), np.array([*PARTS.values()]) / 4.0, atol=0.01)
    assert recovery["frame"][2] <= inner, "all of it is seen"
    assert recovery["seconds"] == "0.50" + "1.00" + "0.50" + "1.50", "the longer parts have theirs in the bar"


def test_lines_and_bars_are_seen_in_their_colors(shown: Path, tmp_path: Path) -> None:
    picture = browser.find(tmp_path).picture(shown, 1280, 3200)
    for color in {*RUN_COLORS[:2], *(recovery_chart.COLORS[part] for part in PARTS)}:
        wanted = np.array(rgb(color))
        assert (np.abs(picture.astype(int) - wanted).max(axis=-1) <= 3).sum() > 50, color
