"""Calls do not wait for a disk that does not answer."""

from __future__ import annotations

import threading
import time

import pytest

from moevement_core.util.bounded import within


def test_what_comes_in_time_comes() -> None:
    assert within(10, lambda: 3) == 3


def test_what_takes_too_long_is_left_behind() -> None:
    release, began = threading.Event(), time.monotonic()
    with pytest.raises(TimeoutError, match=r"\b0\.1 s\b") as caught:
        within(0.1, release.wait)
    assert time.monotonic() - began < 5
    assert caught.value.strerror
    release.set()


def test_errors_are_those_of_the_work() -> None:
    with pytest.raises(NotADirectoryError):
        within(10, lambda: open("/dev/null/x"))  # noqa: SIM115
