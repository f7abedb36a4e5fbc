"""Values that --moevement-protection and moevement plan --protection accept."""

from __future__ import annotations

import pytest

from moevement_core.errors import ConfigError
from moevement_core.replication.protection import Parity, Protection, protection_of
from tests.bad_input.command import unnamed


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, Protection()),
        ("copies:0", Protection(replicas=0)),
        ("copies:3", Protection(replicas=3)),
        ("parity:2+1", Protection(parity=Parity(2, 1))),
        ("parity:10+4", Protection(parity=Parity(10, 4))),
    ],
)
def test_copies_and_parity_are_read(text: str | None, expected: Protection) -> None:
    assert protection_of("--protection", text) == expected


@pytest.mark.parametrize(
    "text", ["x", "", "copies:-1", "copies:1.5", "copies:", "parity:0+0", "parity:1+1", "parity:2+0", "parity:2", " "]
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        protection_of("--protection", text)
    assert not unnamed(str(raised.value), ["--protection", text, "copies:R", "parity:G+M"])
