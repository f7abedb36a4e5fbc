"""A replay that comes to other bits than those that were lost is refused, unless other processors explain it."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any

import pytest

from moevement_core.errors import RecoveryError
from moevement_core.persistence.manifest import Manifest
from moevement_core.policy.partial_experts import LostTokens
from moevement_core.recovery.outcome import Recovery
from moevement_core.session import verdict, window_files
from moevement_core.session.verdict import Part
from moevement_core.session.window_files import _other_arithmetic, arithmetic_of_all

DIFFERS = ["state of experts.0 at iteration 5"]
AT_RANK_1 = rf"\brank 1\b.*{re.escape(DIFFERS[0])}"


def recovery() -> Recovery:
    values: dict[str, Any] = {one.name: 0 for one in fields(Recovery)}
    return Recovery(**values | {"sources": {}, "replayed_by_stage": {}, "lost_tokens": {}, "ranks": ()})


MINE = Part(recovery(), LostTokens(), [], False, [], "A")


def agree(monkeypatch: pytest.MonkeyPatch, everyones: list[Part], window: str = "") -> None:
    monkeypatch.setattr(verdict, "all_gather_objects", lambda mine, kind: everyones)
    monkeypatch.setattr(verdict.dist, "get_rank", lambda: 0)
    verdict.agree(everyones[0], window)


@pytest.mark.parametrize(
    ("everyones", "window", "found"),
    [
        ([MINE, replace(MINE, differences=DIFFERS)], "", AT_RANK_1),
        ([MINE, replace(MINE, differences=DIFFERS, differ_as_loaded=True)], "elsewhere", AT_RANK_1),
        ([MINE, replace(MINE, differences=DIFFERS, differ_as_loaded=True, arithmetic="B")], "", AT_RANK_1),
        (
            [replace(MINE, replicas=[("", (0, 1), "x")]), replace(MINE, replicas=[("", (0, 1), "y")])], "elsewhere",
            r"\branks 0, 1\b",
        ),
    ],
)  # fmt: skip
def test_what_nothing_explains_is_refused(
    everyones: list[Part], window: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RecoveryError, match=found):
        agree(monkeypatch, everyones, window)


@pytest.mark.parametrize(
    ("other", "window", "said"),
    [
        ("A", "window_5 on B", "window_5 on B"),
        ("B", "", r"\bA\b.*\bB\b"),
    ],
)
def test_what_other_processors_explain_is_said(
    other: str, window: str, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    agree(monkeypatch, [MINE, replace(MINE, differences=DIFFERS, arithmetic=other)], window)
    (line,) = caplog.messages
    assert re.search(said, line)
    assert f"rank 1: {DIFFERS[0]}" in line
    caplog.clear()
    agree(monkeypatch, [MINE, replace(MINE, arithmetic="B")], window)
    assert not caplog.messages, "they came to the same bits"


@pytest.mark.parametrize(
    ("then", "here", "named"),
    [
        (("A",), ["A", "A", "A"], None),
        (("A", "B"), ["A", "B"], None),
        (("A", "B"), ["B", "A"], ["A", "B"]),
        (("A",), ["A", "B"], ["A", "A", "B"]),
        ((), ["A", "A"], []),
    ],
)
def test_windows_say_where_they_were_written(
    then: tuple[str, ...], here: list[str], named: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window_files, "all_gather_objects", lambda mine, kind: here)
    manifest = Manifest("abcd", 3, 5, 5, {"iteration": 5}, {}, then)
    said = _other_arithmetic(manifest, arithmetic_of_all())
    assert (manifest.name in said) == bool(said) == (named is not None)
    assert re.findall(r"\b[AB]\b", said) == (named or [])
