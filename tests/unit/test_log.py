"""Lines of a rank's log have level and rank, as text or as JSON, and go to the current standard output."""

from __future__ import annotations

import json
import logging
from logging.handlers import BufferingHandler

import pytest

from moevement_core import log


@pytest.fixture
def logger() -> logging.Logger:
    return logging.getLogger(log.NAME)


def test_a_line_names_level_and_rank(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logger.handlers.clear()  # those of pytest
    monkeypatch.setenv("RANK", "3")
    log.info("a")
    monkeypatch.setenv("RANK", "4")  # as after a failure
    log.warning("b")
    shown = [line.split(": ") for line in capsys.readouterr().out.splitlines()]
    assert shown == [["moevement", "INFO rank 3", "a"], ["moevement", "WARNING rank 4", "b"]]


def test_lines_are_json_where_that_is_asked_for(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logger.handlers.clear()
    monkeypatch.setenv(log.FORMAT_ENV, "json")
    monkeypatch.setenv("RANK", "3")
    log.warning('a "quoted" text')
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(log.PREFIXES), "the launcher knows it for one of ours"
    record = json.loads(line)
    assert record.pop("time") > 0
    assert record == {"moevement": 'a "quoted" text', "level": "WARNING", "rank": 3}


def test_whoever_has_handlers_keeps_them(logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    handler = BufferingHandler(10)
    logger.handlers[:] = [handler]
    log.warning("a")
    assert [record.getMessage() for record in handler.buffer] == ["a"]
    assert capsys.readouterr().out == ""
