"""Threads beside training have a lower priority than those of training."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from moevement_core.util.priority import LEAST, NICENESS, lower_priority


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a priority for each thread")
def test_the_thread_and_those_that_it_starts_and_no_others_are_lowered() -> None:
    before, seen = niceness(), list[int]()

    def work() -> None:
        lower_priority()
        seen.append(niceness())
        inner = threading.Thread(target=lambda: seen.append(niceness()))
        inner.start()
        inner.join()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [min(LEAST, before + NICENESS)] * 2
    assert niceness() == before


def test_a_system_that_refuses_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    lower_priority()
