"""A lock stays usable after a restart posts an exception to a thread that waits for it."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from moevement_core.comms import transport
from moevement_core.device import CpuDevice
from moevement_core.snapshot.arena import PAGE, Arena
from moevement_core.util.gate import Gate


class Restart(BaseException):
    """Exception like the one that a restart raises in the training thread."""


def wait_a_while() -> None:
    for _ in range(1000):
        time.sleep(0.01)


def interrupt_while_waiting(lock: Any, does: Callable[[], Any]) -> None:
    """Post an exception to a thread while ``does`` waits there for ``lock``, which the calling thread holds."""
    raised = list[BaseException]()

    def run() -> None:
        try:
            does()
            wait_a_while()  # the exception is raised here at the latest
        except Restart as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    lock.acquire()
    try:
        thread.start()
        time.sleep(0.2)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(Restart))
    finally:
        lock.release()
    thread.join(5)
    assert raised, "it was interrupted"


def can_be_had(lock: Any) -> bool:
    """Return True if another thread can acquire ``lock``."""
    got = list[bool]()

    def take() -> None:
        got.append(lock.acquire(timeout=1))
        if got[0]:
            lock.release()  # a lock of the product would stay held for all later tests of this process

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return got == [True]


def test_an_arena_and_a_transport_can_be_used_again() -> None:
    arena = Arena(CpuDevice())
    arena.grow(4 * PAGE)
    interrupt_while_waiting(arena._lock, lambda: arena.acquire(PAGE))
    assert can_be_had(arena._lock)
    interrupt_while_waiting(transport.lock, lambda: transport.drained(1.0))
    assert can_be_had(transport.lock)


def test_a_condition_would_keep_its_lock() -> None:
    """Show why gates are needed. A Python that enters conditions in C needs none, and this test fails there."""
    condition = threading.Condition(threading.Lock())

    def enter() -> None:
        with condition:
            pass

    interrupt_while_waiting(condition, enter)
    assert not can_be_had(condition)


@pytest.mark.parametrize("opens_first", [True, False])
def test_a_gate_lets_everyone_through_once_it_is_open(opens_first: bool) -> None:
    gate = Gate()
    if opens_first:
        gate.open()
    threads = [threading.Thread(target=gate.wait, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    gate.open()
    gate.open()
    for thread in threads:
        thread.join(5)
    assert not any(thread.is_alive() for thread in threads)


def test_an_interrupted_wait_at_a_gate_is_none_of_the_next_one() -> None:
    gate = Gate()
    raised = threading.Event()

    def run() -> None:
        try:
            gate.wait()
            wait_a_while()
        except Restart:
            raised.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    time.sleep(0.2)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(Restart))
    gate.open()
    assert raised.wait(5)
    gate.wait()
