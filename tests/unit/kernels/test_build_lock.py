"""Ranks of a node wait while one rank builds the CUDA kernel; a time limit or a restart's exception ends the wait."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from pathlib import Path

import pytest
from moevement_kernels.cuda import grouped_product
from moevement_kernels.cuda.locked import locked


class Restart(Exception):
    """Exception that a restart raises in another thread."""


def test_waiting_for_a_build_has_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "kernel.lock"
    with (
        locked(path, 0.0),
        pytest.raises(TimeoutError, match=rf"\bprocess {os.getpid()}\b.*{path}.*\b0\.2 s"),
        locked(path, 0.2),
    ):
        pass
    with locked(path, 0.0):  # the lock is free again
        assert path.read_text() == str(os.getpid())


def test_a_process_waits_until_the_build_is_done(tmp_path: Path) -> None:
    path, order = tmp_path / "kernel.lock", []

    def wait() -> None:
        with locked(path, 60.0):
            order.append("second")

    with locked(path, 0.0):
        waiting = threading.Thread(target=wait)
        waiting.start()
        time.sleep(0.3)
        order.append("first")
    waiting.join(60)
    assert order == ["first", "second"]


def test_a_restart_gets_through_to_a_process_that_waits(tmp_path: Path) -> None:
    path, ended_by = tmp_path / "kernel.lock", []
    has_begun = threading.Event()

    def wait() -> None:
        try:
            has_begun.set()
            with locked(path, 600.0):
                pass
        except Restart as restart:
            ended_by.append(restart)

    with locked(path, 0.0):
        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        has_begun.wait()
        time.sleep(0.3)  # until the thread waits
        assert waiting.ident is not None
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(waiting.ident), ctypes.py_object(Restart))
        waiting.join(60)
        assert not waiting.is_alive()
    assert [type(exception) for exception in ended_by] == [Restart]


def test_each_node_builds_in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    folders = []
    for node in ("node1.cluster", "node2.cluster"):
        monkeypatch.setattr("socket.gethostname", lambda node=node: node)
        folders.append(grouped_product.build_folder())
    assert len(set(folders)) == 2
    assert all(folder.is_dir() and tmp_path in folder.parents for folder in folders)
