"""Environment variables that processes of a job read: valid values are accepted, all others are refused by name."""

from __future__ import annotations

import pytest

from moevement_core.errors import VariableError
from moevement_core.util.numbers import AT_LEAST_ONE, NOT_NEGATIVE, Range
from moevement_core.util.variables import CHOICES, NUMBERS, RANKS, check_variables
from tests.bad_input.command import unnamed
from tests.unit.range_edges import NO_WHOLE_NUMBER, edges

PORTS = Range(1, 65535)
RANGES = {
    "RANK": NOT_NEGATIVE, "WORLD_SIZE": AT_LEAST_ONE, "LOCAL_RANK": NOT_NEGATIVE, "LOCAL_WORLD_SIZE": AT_LEAST_ONE,
    "MASTER_PORT": PORTS, "OMP_NUM_THREADS": AT_LEAST_ONE, "SLURM_PROCID": NOT_NEGATIVE, "SLURM_NTASKS": AT_LEAST_ONE,
    "SLURM_LOCALID": NOT_NEGATIVE, "SLURM_CPUS_PER_TASK": AT_LEAST_ONE, "MOEVEMENT_MEMBER": NOT_NEGATIVE,
    "MOEVEMENT_FIRST_TASK": NOT_NEGATIVE, "MOEVEMENT_TASKS": AT_LEAST_ONE, "MOEVEMENT_PARENT": AT_LEAST_ONE,
}  # fmt: skip
ADDRESSES = ("x", "host", "host:", ":1", "host:0", "host:99999", "host:port", "host:-1", "host:1.5")


def refusal(**variables: str) -> str | None:
    """Return the message of the refusal; None if the variables are valid."""
    try:
        check_variables(variables)
    except VariableError as error:
        return str(error)
    return None


def test_every_variable_with_a_number_has_a_range() -> None:
    assert set(NUMBERS) == set(RANGES)


@pytest.mark.parametrize("name", RANGES)
def test_a_variable_takes_its_range_and_no_more(name: str) -> None:
    interval = RANGES[name]
    tried = edges(interval, is_whole=True)
    for value in tried.inside:
        assert refusal(**{name: str(value)}) is None, value
    for value in tried.outside:
        text = refusal(**{name: str(value)})
        assert text is not None, value
        assert not unnamed(text, [name, value, interval.least]), text
    for word in (entry for entry in NO_WHOLE_NUMBER if entry):
        text = refusal(**{name: word})
        assert text is not None, word
        assert not unnamed(text, [name, f"'{word}'", interval.least]), text
    assert refusal(**{name: ""}) is None, "an empty one is as if it were not set"


@pytest.mark.parametrize(("number", "count"), RANKS)
def test_a_number_is_below_how_many_there_are(number: str, count: str) -> None:
    assert refusal(**{number: "1", count: "2"}) is None
    for value in (2, 9999999999999999999999):
        text = refusal(**{number: str(value), count: "2"})
        assert text is not None
        assert not unnamed(text, [number, value, count, 2]), text
    assert refusal(**{number: "2", count: "2", "MOEVEMENT_MEMBER": "2"}) is None, "a spare has no rank yet"


@pytest.mark.parametrize(
    ("name", "known"), [("MOEVEMENT_LOG", ("text", "json")), ("MOEVEMENT_PLATFORM", ("cpu", "cuda"))]
)
def test_a_variable_takes_its_choices_and_no_more(name: str, known: tuple[str, ...]) -> None:
    assert CHOICES[name] == known
    for choice in known:
        assert refusal(**{name: choice}) is None
    text = refusal(**{name: "xml"})
    assert text is not None
    assert not unnamed(text, [name, "'xml'", *known]), text


@pytest.mark.parametrize("address", ADDRESSES)
def test_a_store_is_at_a_host_and_a_port(address: str) -> None:
    text = refusal(MOEVEMENT_STORE=address)
    assert text is not None
    assert not unnamed(text, ["MOEVEMENT_STORE", f"'{address}'", "HOST:PORT"]), text
    assert refusal(MOEVEMENT_STORE="host:29500") is None
