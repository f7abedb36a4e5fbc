"""Tests of the numbers that each kind of range holds, and of the words in its refusals."""

from __future__ import annotations

import math

import pytest

from moevement_core.errors import ConfigError
from moevement_core.util.numbers import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE, SHARE, Range
from tests.bad_input.command import Needs, unnamed
from tests.unit.range_edges import edges

SHAPES = Range(0.1, 100.0)
OR_INFINITE = Range(0.0, or_infinite=True)
TABLE: list[tuple[Range, tuple[float, ...], tuple[float, ...], tuple[float, ...]]] = [
    # range, numbers in it, numbers outside it, bounds that a refusal names
    (POSITIVE, (5e-324, 0.5, 1, 1e300), (0, -0.0, -1, -5e-324), (0,)),
    (NOT_NEGATIVE, (0, -0.0, 0.5, 7, 1e300), (-5e-324, -1), (0,)),
    (AT_LEAST_ONE, (1, 2, 10**30), (0, -1, 0.5, 0.9999999999999999), (1,)),
    (SHARE, (0, 0.5, 1), (-5e-324, -1, 1.0000000000000002, 2), (0, 1)),
    (SHAPES, (0.1, 1, 100), (0, 0.09999999999999999, 100.00000000000001, 1e9), (0.1, 100)),
    (Range(0, 1, is_open=True), (5e-324, 0.5, 1), (0, -1, 1.0000000000000002, 2), (0, 1)),
    (OR_INFINITE, (0, 1, math.inf), (-5e-324, -1), (0, math.inf)),
]
NEVER = (math.nan, -math.inf)


@pytest.mark.parametrize(("interval", "held", "others", "bounds"), TABLE, ids=lambda case: str(case))
def test_a_range_holds_its_numbers_alone(
    interval: Range, held: tuple[float, ...], others: tuple[float, ...], bounds: tuple[float, ...]
) -> None:
    for value in held:
        assert interval.holds(value), value
        interval.check("--flag", value)
    for value in (*others, *NEVER, *(() if interval.or_infinite else (math.inf,))):
        assert not interval.holds(value), value
        with pytest.raises(ConfigError) as raised:
            interval.check("--flag", value)
        assert not unnamed(str(raised.value), ["--flag", value, *bounds]), raised.value


@pytest.mark.parametrize("interval", [interval for interval, _, _, _ in TABLE], ids=str)
def test_what_was_left_out_is_in_every_range(interval: Range) -> None:
    interval.check("--flag", None)


@pytest.mark.parametrize("interval", [interval for interval, _, _, _ in TABLE], ids=str)
def test_edges_are_on_both_sides_of_a_range(interval: Range) -> None:
    for is_whole in (False, True) if interval.least.is_integer() and not interval.is_open else (False,):
        tried = edges(interval, is_whole=is_whole)
        assert all(map(interval.holds, tried.inside)), tried
        assert not any(map(interval.holds, tried.outside)), tried


@pytest.mark.parametrize(
    ("text", "needs", "expected"),
    [
        ("--hours nan; needs more than 0", ["--hours", math.nan, 0], []),
        ("--hours-a-day nan", ["--hours", math.nan], ["--hours"]),
        ("--my--hours 1", ["--hours"], ["--hours"]),
        ("--nproc -1: needs 1 or more", ["--nproc", -1, 1], []),
        ("--nproc 10: needs 2", ["--nproc", 1, 0], [1, 0]),
        ("mtbf -1000000000.0", [-1e9, -1], [-1]),
        ("mtbf 1e-09: 3.6e+12, at most 1,000,000", [1e-9, 3.6e12, 1_000_000], []),
        ("Layout(ranks=-1, pipeline=2)", ["ranks", -1, 2], []),
        ("/tmp/run-5/line_7/a.json, line 2", [5, 7, "a.json", "line 2"], [5, 7]),
        ("argument --nproc: invalid int value: 'x'", ["--nproc", "'x'"], []),
        ("banana, infinite", [math.nan, math.inf], [math.nan, math.inf]),
        ("0.999999999 and 1.0", [0.999999999, 1, 0.99], [0.99]),
    ],
)
def test_names_and_numbers_are_found_where_they_stand_alone(text: str, needs: Needs, expected: Needs) -> None:
    assert list(map(str, unnamed(text, needs))) == list(map(str, expected))
