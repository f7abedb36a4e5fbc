"""Command lines that cannot work. Each must end with few lines on stderr, exit code 2 and no traceback.

A row lists what its message must name: the flag, the value found, the bound, the file. It never quotes a sentence, so
messages can be reworded without a change here.
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
"""Seconds that a command may take. A command needs a few; the rest is reserve for a loaded machine."""
GB = 1e9


@dataclass(frozen=True)
class Reason:
    """Error of the operating system, which a message must name in the words of the operating system."""

    number: int
    """Number of the error, as in :mod:`errno`."""

    def __str__(self) -> str:
        return os.strerror(self.number)


Need = str | float | Reason
"""Part of a message: a string that stands alone in it, a number in any notation (-1, -1.0, 1e9), or an OS error."""
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
"""Noun that messages of ``moevement simulate`` use for a flag, and the factor from the flag's unit to the message's."""
OF_CLUSTERS = (
    "--d2h-bandwidth", "--copy-bandwidth", "--network-bandwidth", "--network-share", "--gpus-per-node", "--host-memory",
)  # fmt: skip
"""Flags for which ``moevement plan`` uses the same nouns, because the same class checks them."""
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
    """Return the ``needs`` that a message does not name."""
    numbers = [float(number.replace(",", "")) for number in _NUMBER.findall(text)]
    return [needed for needed in needs if not _is_named(needed, text, numbers)]


def _is_named(needed: Need, text: str, numbers: Sequence[float]) -> bool:
    if isinstance(needed, str | Reason):
        return re.search(rf"(?<![\w-]){re.escape(str(needed))}(?![\w-])", text) is not None
    return any(number == needed or math.isclose(number, needed, rel_tol=_DIGITS) for number in numbers) or (
        math.isnan(needed) and any(math.isnan(number) for number in numbers)
    )


@dataclass(frozen=True)
class Row:
    """Row of a table: a command line, and what its message must name."""

    words: str
    """Command line; words that have blanks are in ``more``."""
    needs: Needs
    more: Sequence[str] = ()
    environment: dict[str, str] = field(default_factory=dict)
    code: int = USAGE_ERROR

    def __post_init__(self) -> None:
        assert not [need for need in self.needs if isinstance(need, str) and _SENTENCE.search(need)], self.needs

    def __str__(self) -> str:
        return " ".join(
            (*self.words.split(), *self.more, *(f"{key}={value}" for key, value in self.environment.items()))
        )


def table(*rows: Row) -> Any:
    """Return the rows as parameters of a test, named by their command lines."""
    return pytest.mark.parametrize("row", rows, ids=str)


def filled(text: str, places: Mapping[str, object]) -> str:
    """Return ``text`` with the paths of a test in the places of ``{name}``."""
    for name, place in places.items():
        text = text.replace(f"{{{name}}}", str(place))
    return text


def check(row: Row, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, **places: object) -> None:
    """Run the command of a row in this process; check its exit code and its message.

    Args:
        row: row, with ``{name}`` where ``places`` have values.
        capfd: fixture of the test.
        monkeypatch: fixture of the test.
        places: paths that the test has prepared, by name.
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
    """Fail if the body of the ``with`` block takes longer than ``seconds``."""

    def fail(number: int, frame: object) -> None:
        raise AssertionError(f"not over after {seconds} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
