"""A bad command line, and what has to come of it: few lines on stderr, an exit code, no traceback, and an end."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from moevement_cli.main import main
from moevement_core.exit_codes import USAGE_ERROR

MOST_LINES = 3
LIMIT_S = 60
"""Of a loaded machine; what ends at all ends in a few of them."""


@dataclass(frozen=True)
class Row:
    """One line of a table."""

    words: str
    """The command line; those with blanks in ``more``."""
    needs: Sequence[str]
    """What stderr must contain, blanks counted once."""
    more: Sequence[str] = ()
    environment: dict[str, str] = field(default_factory=dict)
    code: int = USAGE_ERROR

    def __str__(self) -> str:
        return " ".join((*self.words.split(), *self.more, *(f"{key}={its}" for key, its in self.environment.items())))


def table(*rows: Row) -> Any:
    """The rows as parameters of a test, named by their command lines."""
    return pytest.mark.parametrize("row", rows, ids=str)


def check(row: Row, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, **places: object) -> None:
    """Run a row in this process.

    Args:
        row: with ``{name}`` where ``places`` have values.
        capfd: of the test.
        monkeypatch: of the test.
        places: paths that a test has prepared.
    """
    for name, value in row.environment.items():
        monkeypatch.setenv(name, value)
    words = [word.format(**places) for word in (*row.words.split(), *row.more)]
    capfd.readouterr()
    with within(LIMIT_S):
        code = _code_of(words)
    errors = capfd.readouterr().err
    assert code == row.code, errors
    assert "Traceback" not in errors
    assert 1 <= len(errors.strip().splitlines()) <= MOST_LINES, errors
    for needed in row.needs:
        assert needed.format(**places) in errors, errors


def _code_of(words: Sequence[str]) -> object:
    try:
        return main(words)
    except SystemExit as exit_:
        return exit_.code


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Fail if what is done takes longer."""

    def fail(number: int, frame: object) -> None:
        raise AssertionError(f"not over after {seconds} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
