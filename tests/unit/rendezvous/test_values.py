"""Values of a job: what processes set, claim, raise, watch and report, in the process of the coordinator."""

from __future__ import annotations

import pytest

from moevement_core.rendezvous.values import RequestKind, Values, number_of


def nothing(key: str, value: str) -> None:
    """Take a change, and do nothing."""


@pytest.fixture
def values() -> Values:
    return Values()


def test_the_first_claim_of_a_key_stands(values: Values) -> None:
    assert values.claim("key", "a") == "a"
    assert values.claim("key", "b") == "a"
    assert values.answer("claim", "key", "c", nothing) == "a"


def test_a_value_is_raised_and_never_lowered(values: Values) -> None:
    for value in ("3 x", "2 y", "3 z", "10"):
        values.raise_to("key", value)
    assert values.read("key") == "10"
    assert (number_of(None), number_of("7"), number_of("-1 b")) == (-1, 7, -1)


def test_watchers_hear_of_each_change_once(values: Values) -> None:
    heard: list[tuple[str, str]] = []

    def watcher(key: str, value: str) -> None:
        heard.append((key, value))

    assert values.watch("key", watcher) is None
    values.watch("key", watcher)
    for value in ("a", "a", "b"):
        values.set("key", value)
    values.set("other", "c")
    assert heard == [("key", "a"), ("key", "b")]
    values.forget(watcher)
    values.set("key", "d")
    assert len(heard) == 2


def test_a_report_is_new_until_it_is_taken_and_when_it_changes(values: Values) -> None:
    for value in ("a", "a"):
        values.answer("report", "topic/5", value, nothing)
        assert values.has_news
    assert (values.new_reports("topic"), values.new_reports("topic")) == ({5: "a"}, {})
    values.report("topic", 5, "a")
    assert values.new_reports("topic") == {}
    values.report("topic", 5, "b")
    assert values.new_reports("topic") == {5: "b"}
    assert values.reports("topic") == {5: "b"}
    values.report("top", 1, "stays")
    values.report("topic", 6, "c")
    values.forget_reports("topi")
    assert (values.reports("topic"), values.new_reports("topic"), values.new_reports("top")) == ({}, {}, {1: "stays"})


MALFORMED = [
    ("add", "key", "1"), ("set", "key", None), ("set", 3, "a"), ("set", "key", 3), ("report", "topic/x", "a"),
    ("report", "topic", "a"), ("raise", "key", "x"), ("claim", ["key"], "a"), (None, "key", "a"),
]  # fmt: skip


@pytest.mark.parametrize("request_", MALFORMED, ids=str)
def test_a_malformed_request_changes_nothing(values: Values, request_: tuple[object, object, object]) -> None:
    values.set("key", "1")
    with pytest.raises((ValueError, TypeError)):
        values.answer(*request_, nothing)  # type: ignore[arg-type]
    assert values.read("key") == "1"
    assert not values.has_news


def test_every_kind_of_request_is_answered(values: Values) -> None:
    answers = [values.answer(kind, "1", "2", nothing) for kind in RequestKind if kind is not RequestKind.REPORT]
    assert answers == [None, "2", None, "2", "2"]
