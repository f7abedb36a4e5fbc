"""Damages to run directories: files that are cut off, replaced, or of another version.

Each damage lists what the error message of a reader must name.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moevement_core.run.run_record import RunRecord
from tests.bad_input.command import Needs, Reason

Change = Callable[[RunRecord], None]
METRICS, EVENTS, SUMMARY = "metrics.jsonl", "events.jsonl", "summary.json"
RANKS, STRANGERS, CONFIG, JOB = "ranks.json", "refused_connections.json", "config.yaml", "job.json"


@dataclass(frozen=True)
class Damage:
    """Damage to one file of a run directory, and what a message about it must name."""

    name: str
    file: str
    change: Change
    needs: Needs
    """Values that the message must name besides the file."""

    def __str__(self) -> str:
        return self.name


def content(file: str, text: bytes) -> Change:
    """Return a change that replaces a file."""

    def write(run: RunRecord) -> None:
        (run.folder / file).write_bytes(text)

    return write


def changed_json(file: str, **changed: Any) -> Change:
    """Return a change of fields of a file that holds one JSON object."""

    def change(run: RunRecord) -> None:
        path = run.folder / file
        path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))

    return change


def fields(file: str, **changed: Any) -> Change:
    """Return a change of fields of the first line of a file; a field that becomes ``...`` is removed."""

    def change(run: RunRecord) -> None:
        path = run.folder / file
        first, *others = path.read_text().splitlines(keepends=True)
        row = {**json.loads(first), **changed}
        path.write_text(
            json.dumps({key: value for key, value in row.items() if value is not ...}) + "\n" + "".join(others)
        )

    return change


def event(kind: str, **changed: Any) -> Change:
    """Return a change of fields of all events of a kind; a field that becomes ``...`` is removed."""

    def change(run: RunRecord) -> None:
        lines = [json.loads(line) for line in run.events_path.read_text().splitlines()]
        lines = [{**line, **changed} if line["event"] == kind else line for line in lines]
        lines = [{key: value for key, value in line.items() if value is not ...} for line in lines]
        run.events_path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    return change


def summary(value: Any) -> Change:
    """Return a change that replaces the summary."""
    return content(SUMMARY, json.dumps(value).encode())


def pipe(file: str) -> Change:
    """Return a change that puts a pipe without a writer in the place of a file."""

    def make(run: RunRecord) -> None:
        (run.folder / file).unlink(missing_ok=True)
        os.mkfifo(run.folder / file)

    return make


def folder(file: str) -> Change:
    """Return a change that puts a folder in the place of a file."""

    def make(run: RunRecord) -> None:
        (run.folder / file).unlink(missing_ok=True)
        (run.folder / file).mkdir()

    return make


NO_TEXT = bytes(range(128, 256)) + b"\n"
DEEP = b"[" * 100_000 + b"\n"
DIGEST = {"all": "ab", "parts": {"weights": "c"}, "ranks": []}
IS_A_FOLDER = Reason(errno.EISDIR)
DAMAGES = (
    Damage("metrics no text", METRICS, content(METRICS, NO_TEXT), ["JSON"]),
    Damage("metrics list", METRICS, content(METRICS, b"[]\n{}\n"), ["JSON"]),
    Damage("metrics deep", METRICS, content(METRICS, DEEP), ["JSON"]),
    Damage("metrics zeros", METRICS, content(METRICS, bytes(5000) + b"\n"), ["JSON"]),
    Damage("metrics folder", METRICS, folder(METRICS), [IS_A_FOLDER]),
    Damage("metrics pipe", METRICS, pipe(METRICS), ["pipe"]),
    Damage("iteration text", METRICS, fields(METRICS, iteration="one"), ["iteration", "'one'"]),
    Damage("iteration none", METRICS, fields(METRICS, iteration=None), ["iteration", "None"]),
    Damage("iteration missing", METRICS, fields(METRICS, iteration=...), ["no iteration"]),
    Damage("iteration list", METRICS, fields(METRICS, iteration=[1]), ["iteration", "[1]"]),
    Damage("iteration fraction", METRICS, fields(METRICS, iteration=1.5), ["iteration", 1.5]),
    Damage("iteration huge", METRICS, fields(METRICS, iteration=10**400), ["iteration", 1e56]),
    Damage("iteration negative", METRICS, fields(METRICS, iteration=-1), ["iteration", -1]),
    Damage("loss text", METRICS, fields(METRICS, loss="low"), ["loss", "'low'"]),
    Damage("loss object", METRICS, fields(METRICS, loss={}), ["loss", "{}"]),
    Damage("time text", METRICS, fields(METRICS, time="noon"), ["time", "'noon'"]),
    Damage("time infinite", METRICS, fields(METRICS, time=math.inf), ["time", math.inf]),
    Damage("rate text", METRICS, fields(METRICS, tokens_per_s="fast"), ["tokens_per_s", "'fast'"]),
    Damage("memory missing", METRICS, fields(METRICS, log_memory_bytes=...), ["log_memory_bytes"]),
    Damage("events pipe", EVENTS, pipe(EVENTS), ["pipe"]),
    Damage("events no text", EVENTS, content(EVENTS, NO_TEXT), ["JSON"]),
    Damage("events no kind", EVENTS, fields(EVENTS, event=...), ["event", "None"]),
    Damage("events kind", EVENTS, fields(EVENTS, event=5), ["event", 5]),
    Damage("events no time", EVENTS, fields(EVENTS, time=...), ["time", "None"]),
    Damage("failure older", EVENTS, event("failure", parts=...), ["failure", "no parts"]),
    Damage("failure parts", EVENTS, event("failure", parts={"detect": "long"}), ["failure", "no parts"]),
    Damage("failure recovery", EVENTS, event("failure", recovery=7), ["failure", "recovery", 7]),
    Damage("failure within", EVENTS, event("failure", recovery={"first": 1}), ["failure", "recovery", "until"]),
    Damage("recovery older", EVENTS, event("recovery", sends=...), ["recovery", "sends"]),
    Damage("recovery tokens", EVENTS, event("recovery", lost_tokens={"e": "many"}), ["lost_tokens", "'many'"]),
    Damage("recovery sources", EVENTS, event("recovery", sources=[]), ["recovery", "sources", "[]"]),
    Damage("summary pipe", SUMMARY, pipe(SUMMARY), ["pipe"]),
    Damage("summary list", SUMMARY, summary([1]), ["no state_digest"]),
    Damage("summary text", SUMMARY, summary("done"), ["no state_digest"]),
    Damage("summary empty", SUMMARY, content(SUMMARY, b""), ["JSON", "column 1"]),
    Damage("summary cut", SUMMARY, content(SUMMARY, b'{"state_digest": {"all"'), ["JSON", "column 24"]),
    Damage("summary no text", SUMMARY, content(SUMMARY, NO_TEXT), ["JSON", "0x80"]),
    Damage("summary deep", SUMMARY, content(SUMMARY, DEEP), ["JSON", "recursion"]),
    Damage("summary folder", SUMMARY, folder(SUMMARY), [IS_A_FOLDER]),
    Damage("digest text", SUMMARY, summary({"state_digest": "ab"}), ["no state_digest"]),
    Damage("digest parts", SUMMARY, summary({"state_digest": {**DIGEST, "parts": 3}}), ["state_digest is"]),
    Damage("digest ranks", SUMMARY, summary({"state_digest": {**DIGEST, "ranks": [1]}}), ["state_digest", "no ranks"]),
    Damage("checkpointing", SUMMARY, summary({"state_digest": DIGEST, "checkpointing": 4}), ["checkpointing"]),
    Damage("environment", SUMMARY, summary({"state_digest": DIGEST, "environment": 4}), ["environment"]),
    Damage("validation", SUMMARY, summary({"state_digest": DIGEST, "validation_loss": []}), ["validation_loss", "[]"]),
    Damage("ranks pipe", RANKS, pipe(RANKS), ["pipe"]),
    Damage("ranks text", RANKS, content(RANKS, b'"x"'), ["str", "list"]),
    Damage("ranks cut", RANKS, content(RANKS, b'[{"rank"'), ["column 9"]),
    Damage("ranks of text", RANKS, content(RANKS, b"[1]"), [1, "no process"]),
    Damage("ranks no host", RANKS, content(RANKS, b'[{"role": "active", "rank": 0}]'), ["host", "None"]),
    Damage("ranks no rank", RANKS, content(RANKS, b'[{"role": "active", "host": "a"}]'), ["rank", "None"]),
    Damage("job list", JOB, content(JOB, b"[1]"), ["[1]"]),
    Damage("job cut", JOB, content(JOB, b'{"com'), ["column 2"]),
    Damage("job without command", JOB, content(JOB, b"{}"), ["command"]),
    Damage("job of text", JOB, changed_json(JOB, ranks="4"), ["ranks", "'4'"]),
    Damage("job without code", JOB, changed_json(JOB, code=None), ["code"]),
    Damage("strangers list", STRANGERS, content(STRANGERS, b"[1]"), ["[1]", "no count"]),
    Damage("strangers cut", STRANGERS, content(STRANGERS, b'{"con'), ["column 2"]),
    Damage("strangers text", STRANGERS, content(STRANGERS, b'{"connections": "1"}'), ["'connections'", "'1'"]),
    Damage("config pipe", CONFIG, pipe(CONFIG), ["pipe"]),
    Damage("config no text", CONFIG, content(CONFIG, NO_TEXT), ["YAML", "0x80"]),
    Damage("config list", CONFIG, content(CONFIG, b"[1]"), ["list"]),
)
