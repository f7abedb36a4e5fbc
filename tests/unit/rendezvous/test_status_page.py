"""Tests of the memory page that a process shares with its supervisor."""

from __future__ import annotations

import gc
import os
import threading
import time

import pytest

from moevement_core.rendezvous import status_page
from moevement_core.rendezvous.status_page import PAGE_ENV, StatusPage, boot_time_s, own_page, wait_until_held


def test_both_sides_see_what_the_other_writes() -> None:
    supervisor = StatusPage()
    process = StatusPage(supervisor.path)
    assert (process.is_held, process.is_winding_down, supervisor.committed) == (True, False, None)
    process.commit(41)
    supervisor.hold_until(boot_time_s() - 1)
    supervisor.ask_to_wind_down()
    assert (supervisor.committed, process.is_held, process.is_winding_down) == (41, False, True)
    supervisor.hold_until(boot_time_s() + 60)
    assert process.is_held
    supervisor.set_waiting(waits=True)
    assert process.is_waiting
    supervisor.set_waiting(waits=False)
    assert not process.is_waiting
    supervisor.close()
    process.commit(42)
    assert supervisor.committed == 42, "what both have mapped stays"


def test_pages_of_processes_that_ended_take_no_descriptors() -> None:
    def open_pages() -> int:
        gc.collect()
        return sum(
            "moevement-status" in os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")
        )

    before = open_pages()
    for _ in range(20):
        StatusPage().close()
    assert open_pages() == before


def test_a_process_whose_lease_has_run_out_does_nothing_until_it_is_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = StatusPage()
    monkeypatch.setattr(status_page, "_page", None)
    monkeypatch.setenv(PAGE_ENV, supervisor.path)
    supervisor.hold_until(boot_time_s())
    threading.Timer(0.3, supervisor.hold_until, [boot_time_s() + 60]).start()
    began = time.monotonic()
    wait_until_held()
    assert time.monotonic() - began > 0.2
    assert own_page() is not None


def test_without_a_supervisor_a_lease_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_page, "_page", None)
    monkeypatch.delenv(PAGE_ENV, raising=False)
    wait_until_held()
    assert own_page() is None
