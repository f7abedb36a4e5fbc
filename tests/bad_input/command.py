"""A command line that cannot work, and what must come of it: few lines on stderr, exit code 2, no traceback, an end.

A row says what its message must name: the flag, the value found, the bound, the file. It never quotes a sentence, so
that messages can be reworded without a change here.
"""

from __future__ import annotations

import math
import os
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from moevement_cli.main import main
from moevement_core.util.exit_codes import USAGE_ERROR

MOST_LINES = 3
LIMIT_S = 60
"""Any command that ends at all ends in a few seconds; this leaves room for a loaded machine."""
GB = 1e9


@dataclass(frozen=True)
class Reason:
    """What the operating system calls an error."""

    number: int
    """Of :mod:`errno`."""

    def __str__(self) -> str:
        return os.strerror(self.number)


Need = str | float | Reason
"""What a message names: a string that stands alone in it, a number in any notation (-1, -1.0, 1e9), an OS error."""
Needs = Sequence[Need]
NOUNS: dict[str, tuple[str, float]] = {
    "--mtbf": ("mtbf", 1), "--hours": ("hours", 1), "--speedup": ("speedup", 1), "--repair": ("repair", 1),
    "--iteration-time": ("iteration_s", 1), "--weibull": ("Weibull shape", 1), "--together": ("failing together", 1),
    "--detect": ("detect", 1), "--regroup": ("regroup", 1), "--interference": ("interference", 1),
    "--contention": ("contention", 1),
    "--skew": ("skew", 1), "--network-share": ("network share", 1), "--gpus-per-node": ("GPUs per", 1),
    "--window": ("window", 1), "--replicas": ("replicas", 1), "--ranks": ("ranks", 1), "--spares": ("spares", 1),
    "--seeds": ("seeds", 1), "--first-seed": ("first_seed", 1), "--host-memory": ("host memory", GB),
    "--d2h-bandwidth": ("from device", GB), "--network-bandwidth": ("network bandwidth", GB),
    "--copy-bandwidth": ("copy bandwidth", GB), "--storage-bandwidth": ("storage bandwidth", GB),
}  # fmt: skip
"""What ``moevement simulate`` calls the value of a flag in its messages, and the factor to the unit it shows."""
OF_CLUSTERS = (
    "--d2h-bandwidth", "--copy-bandwidth", "--network-bandwidth", "--network-share", "--gpus-per-node", "--host-memory",
)  # fmt: skip
"""Flags that ``moevement plan`` calls by the same nouns, because the same class checks them."""
_NUMBER = re.compile(
    r"(?<![\w.-])(?:-?inf|nan|-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[+-]?\d+)?)(?!\w)", re.IGNORECASE
)
_DIGITS = 1e-5
"""Relative tolerance: messages show at least six digits."""
_SENTENCE = re.compile(r"(?<![\w-])[A-Za-z']+[,;:.]? +[A-Za-z']+[,;:.]? +[A-Za-z']+(?![\w-])")


def named_in_simulate(flag: str, value: float) -> Needs:
    """Return what a message of ``moevement simulate`` about a flag must name."""
    noun, factor = NOUNS.get(flag, (flag, 1))
    return [noun, value * factor]


def named_in_plan(flag: str, value: float) -> Needs:
    """Return what a message of ``moevement plan`` about a flag must name."""
    return named_in_simulate(flag, value) if flag in OF_CLUSTERS else [flag, value]


def unnamed(text: str, needs: Needs) -> list[Need]:
    """Return those of ``needs`` that a message does not name."""
    numbers = [float(found.replace(",", "")) for found in _NUMBER.findall(text)]
    return [needed for needed in needs if not _is_named(needed, text, numbers)]


def _is_named(needed: Need, text: str, numbers: Sequence[float]) -> bool:
    if isinstance(needed, str | Reason):
        return re.search(rf"(?<![\w-]){re.escape(str(needed))}(?![\w-])", text) is not None
    return any(found == needed or math.isclose(found, needed, rel_tol=_DIGITS) for found in numbers) or (
        math.isnan(needed) and any(math.isnan(found) for found in numbers)
    )


@dataclass(frozen=True)
class Row:
    """One line of a table."""

    words: str
    """The command line; words with blanks in them stand in ``more``."""
    needs: Needs
    more: Sequence[str] = ()
    environment: dict[str, str] = field(default_factory=dict)
    code: int = USAGE_ERROR

    def __post_init__(self) -> None:
        assert not [one for one in self.needs if isinstance(one, str) and _SENTENCE.search(one)], self.needs

    def __str__(self) -> str:
        return " ".join((*self.words.split(), *self.more, *(f"{key}={its}" for key, its in self.environment.items())))


def table(*rows: Row) -> Any:
    """Return the rows as parameters of a test, named by their command lines."""
    return pytest.mark.parametrize("row", rows, ids=str)


def filled(text: str, places: Mapping[str, object]) -> str:
    """Put the paths of a test in the place of ``{name}``."""
    for name, place in places.items():
        text = text.replace(f"{{{name}}}", str(place))
    return text


def check(row: Row, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, **places: object) -> None:
    """Run the command of a row in this process and compare what comes of it.

    Args:
        row: with ``{name}`` where ``places`` have values.
        capfd: of the test.
        monkeypatch: of the test.
        places: paths that a test has prepared.
    """
    for name, value in row.environment.items():
        monkeypatch.setenv(name, value)
    words = [filled(word, places) for word in (*row.words.split(), *row.more)]
    capfd.readouterr()
    with within(LIMIT_S):
        code = _code_of(words)
    errors = capfd.readouterr().err
    assert code == row.code, errors
    assert "Traceback" not in errors
    assert 1 <= len(errors.strip().splitlines()) <= MOST_LINES, errors
    needs = [filled(needed, places) if isinstance(needed, str) else needed for needed in row.needs]
    assert not unnamed(errors, needs), errors


def _code_of(words: Sequence[str]) -> object:
    try:
        return main(words)
    except SystemExit as exit_:
        return exit_.code


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Fail if the body of the ``with`` block takes longer."""

    def fail(number: int, frame: object) -> None:
        raise AssertionError(f"not over after {seconds} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
