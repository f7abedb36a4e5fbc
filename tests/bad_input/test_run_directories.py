"""Run directories that were damaged, cut off, or written by another version, under whatever reads them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moevement_core.run_record import RunRecord
from tests.bad_input.command import Row, check
from tests.unit.monitoring.runs import recovered_run

Damage = Callable[[RunRecord], None]


def put(name: str, content: bytes) -> Damage:
    """A file of the run with this in it."""

    def write(run: RunRecord) -> None:
        (run.folder / name).write_bytes(content)

    return write


def changed(name: str, **fields: Any) -> Damage:
    """Fields of the first line; what is ``...`` goes."""

    def change(run: RunRecord) -> None:
        path = run.folder / name
        first, *rest = path.read_text().splitlines(keepends=True)
        found = {**json.loads(first), **fields}
        path.write_text(json.dumps({key: its for key, its in found.items() if its is not ...}) + "\n" + "".join(rest))

    return change


def event_changed(kind: str, **fields: Any) -> Damage:
    """Fields of the events of a kind; what is ``...`` goes."""

    def change(run: RunRecord) -> None:
        lines = [json.loads(line) for line in run.events_path.read_text().splitlines()]
        lines = [{**line, **fields} if line["event"] == kind else line for line in lines]
        lines = [{key: its for key, its in line.items() if its is not ...} for line in lines]
        run.events_path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    return change


def summary(content: Any) -> Damage:
    """Another summary."""
    return put("summary.json", json.dumps(content).encode())


def pipe(name: str) -> Damage:
    """A pipe where a file was, to which nobody writes."""

    def make(run: RunRecord) -> None:
        (run.folder / name).unlink(missing_ok=True)
        os.mkfifo(run.folder / name)

    return make


def folder(name: str) -> Damage:
    """A folder where a file was."""

    def make(run: RunRecord) -> None:
        (run.folder / name).unlink(missing_ok=True)
        (run.folder / name).mkdir()

    return make


NO_TEXT = bytes(range(128, 256)) + b"\n"
DEEP = b"[" * 100_000 + b"\n"
DIGEST = {"all": "ab", "parts": {"weights": "c"}, "ranks": []}
READERS = {
    "verify": "verify {run} {whole}", "report": "report {run}", "html": "report {run} --html {folder}/page.html",
    "plot": "report {run} --plot {folder}/plot.svg", "trace": "report {run} --trace {folder}/trace.json",
    "top": "top {run} --once", "json": "report {run} --json", "top_json": "top {run} --json",
}  # fmt: skip
LINES = ("verify", "report", "html", "plot", "trace", "top")
EVENTS = ("verify", "report", "html", "trace", "top")
SUMMARIES = ("verify", "report", "html")
DAMAGES: list[tuple[str, tuple[str, ...], Damage, str]] = [
    ("metrics no text", LINES, put("metrics.jsonl", NO_TEXT), "no JSON object"),
    ("metrics list", LINES, put("metrics.jsonl", b"[]\n{}\n"), "no JSON object"),
    ("metrics deep", LINES, put("metrics.jsonl", DEEP), "no JSON object"),
    ("metrics zeros", LINES, put("metrics.jsonl", bytes(5000) + b"\n"), "no JSON object"),
    ("metrics folder", LINES, folder("metrics.jsonl"), "metrics.jsonl: Is a directory"),
    ("metrics pipe", LINES, pipe("metrics.jsonl"), "metrics.jsonl: no regular file"),
    ("events pipe", EVENTS, pipe("events.jsonl"), "events.jsonl: no regular file"),
    ("summary pipe", SUMMARIES, pipe("summary.json"), "summary.json: no regular file"),
    ("ranks pipe", ("top",), pipe("ranks.json"), "no regular file"),
    ("config pipe", ("top",), pipe("config.yaml"), "config.yaml: no regular file"),
    ("metrics empty", ("report", "html"), put("metrics.jsonl", b""), "no metrics"),
    ("iteration text", LINES, changed("metrics.jsonl", iteration="one"), "iteration 'one'; needs a whole number"),
    ("iteration none", LINES, changed("metrics.jsonl", iteration=None), "iteration None; needs a whole number"),
    ("iteration missing", LINES, changed("metrics.jsonl", iteration=...), "no iteration"),
    ("iteration list", LINES, changed("metrics.jsonl", iteration=[1]), "iteration [1]; needs a whole number"),
    ("iteration fraction", LINES, changed("metrics.jsonl", iteration=1.5), "iteration 1.5; needs a whole number"),
    ("iteration huge", LINES, changed("metrics.jsonl", iteration=10**400), "iteration 1000"),
    ("iteration negative", LINES, changed("metrics.jsonl", iteration=-1), "iteration -1; needs a whole number"),
    ("loss text", LINES, changed("metrics.jsonl", loss="low"), "loss 'low'; needs a number"),
    ("loss object", LINES, changed("metrics.jsonl", loss={}), "loss {{}}; needs a number"),
    ("time text", LINES, changed("metrics.jsonl", time="noon"), "time 'noon'; needs a number"),
    ("time infinite", LINES, changed("metrics.jsonl", time=float("inf")), "time inf; needs a number"),
    ("rate text", LINES, changed("metrics.jsonl", tokens_per_s="fast"), "tokens_per_s 'fast'; needs a number"),
    ("memory missing", LINES, changed("metrics.jsonl", log_memory_bytes=...), "no log_memory_bytes"),
    ("events no text", EVENTS, put("events.jsonl", NO_TEXT), "no JSON object"),
    ("events no kind", EVENTS, changed("events.jsonl", event=...), "event None"),
    ("events kind", EVENTS, changed("events.jsonl", event=5), "event 5"),
    ("events no time", EVENTS, changed("events.jsonl", time=...), "time None"),
    ("failure older", EVENTS, event_changed("failure", parts=...), "failure: no parts; it was not written by this"),
    ("failure parts", EVENTS, event_changed("failure", parts={"detect": "long"}), "failure: no parts"),
    ("failure recovery", EVENTS, event_changed("failure", recovery=7), "failure: recovery 7"),
    ("failure within", EVENTS, event_changed("failure", recovery={"first": 1}), "failure: recovery: no until"),
    ("recovery older", EVENTS, event_changed("recovery", sends=...), "recovery: no sends"),
    ("recovery tokens", EVENTS, event_changed("recovery", lost_tokens={"e": "many"}), "recovery: lost_tokens"),
    ("recovery sources", EVENTS, event_changed("recovery", sources=[]), "recovery: sources []"),
    ("summary list", SUMMARIES, summary([1]), "holds no state_digest"),
    ("summary text", SUMMARIES, summary("done"), "holds no state_digest"),
    ("summary empty", SUMMARIES, put("summary.json", b""), "not JSON"),
    ("summary cut", SUMMARIES, put("summary.json", b'{"state_digest": {"all"'), "not JSON"),
    ("summary no text", SUMMARIES, put("summary.json", NO_TEXT), "not JSON"),
    ("summary deep", SUMMARIES, put("summary.json", DEEP), "not JSON"),
    ("summary folder", SUMMARIES, folder("summary.json"), "summary.json: Is a directory"),
    ("digest text", SUMMARIES, summary({"state_digest": "ab"}), "holds no state_digest"),
    ("digest parts", SUMMARIES, summary({"state_digest": {**DIGEST, "parts": 3}}), "its state_digest is none"),
    ("digest ranks", SUMMARIES, summary({"state_digest": {**DIGEST, "ranks": [1]}}), "has no ranks"),
    ("checkpointing", SUMMARIES, summary({"state_digest": DIGEST, "checkpointing": 4}), "its checkpointing lacks"),
    ("validation", SUMMARIES, summary({"state_digest": DIGEST, "validation_loss": []}), "validation_loss []"),
    ("ranks text", ("top",), put("ranks.json", b'"x"'), "ranks.json: holds str, not a list"),
    ("ranks cut", ("top",), put("ranks.json", b'[{"rank"'), "ranks.json: cannot be read"),
    ("ranks of text", ("top",), put("ranks.json", b"[1]"), "1 is no process"),
    ("ranks no host", ("top",), put("ranks.json", b'[{"role": "active", "rank": 0}]'), "host None"),
    ("ranks no rank", ("top",), put("ranks.json", b'[{"role": "active", "host": "a"}]'), "rank None"),
    ("strangers list", ("top",), put("strangers.json", b"[1]"), "strangers.json: [1] is no count"),
    ("strangers cut", ("top",), put("strangers.json", b'{"val'), "strangers.json: cannot be read"),
    ("strangers text", ("top",), put("strangers.json", b'{"values": "1"}'), "is no count"),
    ("config no text", ("top",), put("config.yaml", NO_TEXT), "config.yaml: not YAML"),
    ("config list", ("top",), put("config.yaml", b"[1]"), "holds list, not flags"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("reader", "damage", "needed"),
    [(reader, damage, needed) for _, readers, damage, needed in DAMAGES for reader in readers],
    ids=[f"{reader}-{name}" for name, readers, _, _ in DAMAGES for reader in readers],
)
def test_damaged(
    reader: str, damage: Damage, needed: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    run, whole = recovered_run(tmp_path / "run", has_ended=reader != "top"), recovered_run(tmp_path / "whole")
    damage(run)
    row = Row(READERS[reader], [needed])
    check(row, capfd, monkeypatch, run=run.folder, whole=whole.folder, folder=tmp_path)


@pytest.mark.parametrize("reader", READERS)
def test_the_undamaged_one_is_read(reader: str, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from moevement_cli.main import main

    run, whole = recovered_run(tmp_path / "run"), recovered_run(tmp_path / "whole")
    with run.metrics_path.open("a") as file:
        file.write('{"iteration": 11, "lo')  # as a writer that was killed leaves it
    words = READERS[reader].format(run=run.folder, whole=whole.folder, folder=tmp_path)
    assert main(words.split()) == 0
    assert not capfd.readouterr().err


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("place", ["{folder}/none", "{folder}", "/dev/null", "/proc/self/mem", "{file}", "{long}"])
def test_no_run(
    reader: str, place: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("x")
    given = place.format(folder=tmp_path, file=tmp_path / "file", long=tmp_path / ("x" * 300))
    whole = recovered_run(tmp_path / "whole")
    check(Row(READERS[reader], [given[:100]]), capfd, monkeypatch, run=given, whole=whole.folder, folder=tmp_path)
