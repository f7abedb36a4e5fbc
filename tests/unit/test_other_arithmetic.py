"""A replay that comes to other bits than those that were lost is refused, unless other processors explain it."""

from __future__ import annotations

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


def recovery() -> Recovery:
    values: dict[str, Any] = {one.name: 0 for one in fields(Recovery)}
    return Recovery(**values | {"sources": {}, "replayed_by_stage": {}, "lost_tokens": {}, "ranks": ()})


MINE = Part(recovery(), LostTokens(), [], False, [], "A")


def agree(monkeypatch: pytest.MonkeyPatch, everyones: list[Part], window: str = "") -> None:
    monkeypatch.setattr(verdict, "all_gather_objects", lambda mine, kind: everyones)
    monkeypatch.setattr(verdict.dist, "get_rank", lambda: 0)
    verdict.agree(everyones[0], window)


@pytest.mark.parametrize(
    ("everyones", "window"),
    [
        ([MINE, replace(MINE, differences=DIFFERS)], ""),
        ([MINE, replace(MINE, differences=DIFFERS, differ_as_loaded=True)], "it was written elsewhere"),
        ([MINE, replace(MINE, differences=DIFFERS, differ_as_loaded=True, arithmetic="B")], ""),
        ([replace(MINE, replicas=[("", (0, 1), "x")]), replace(MINE, replicas=[("", (0, 1), "y")])], "elsewhere"),
    ],
)
def test_what_nothing_explains_is_refused(everyones: list[Part], window: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecoveryError, match="the replayed state is not the one that was lost"):
        agree(monkeypatch, everyones, window)


@pytest.mark.parametrize(
    ("other", "window", "said"),
    [
        ("A", "window_5 was written on B", "window_5 was written on B"),
        ("B", "", "ranks are of different kinds: A and B"),
    ],
)
def test_what_other_processors_explain_is_said(
    other: str, window: str, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    agree(monkeypatch, [MINE, replace(MINE, differences=DIFFERS, arithmetic=other)], window)
    (line,) = caplog.messages
    assert line.startswith(said)
    assert f"rank 1: {DIFFERS[0]}" in line
    caplog.clear()
    agree(monkeypatch, [MINE, replace(MINE, arithmetic="B")], window)
    assert not caplog.messages, "they came to the same bits"


@pytest.mark.parametrize(
    ("then", "here", "said"),
    [
        (("A",), ["A", "A", "A"], ""),
        (("A", "B"), ["A", "B"], ""),
        (("A", "B"), ["B", "A"], "was written by ranks on A and B, which other ranks are on now"),
        (("A",), ["A", "B"], "was written on A, and these ranks are on A and B"),
        ((), ["A", "A"], "does not say on what processors it was written"),
    ],
)
def test_windows_say_where_they_were_written(
    then: tuple[str, ...], here: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window_files, "all_gather_objects", lambda mine, kind: here)
    manifest = Manifest("abcd", 3, 5, 5, {"iteration": 5}, {}, then)
    assert _other_arithmetic(manifest, arithmetic_of_all()) == (said and f"{manifest.name} {said}")
