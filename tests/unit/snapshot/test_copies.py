"""Shutdown of the copying thread, when an exception interrupts it."""

from __future__ import annotations

import threading

import pytest
import torch

from moevement_core.device import CpuDevice
from moevement_core.snapshot.copies import Capture, CopyEngine, copy_engine


class Interrupted(BaseException):
    """Exception like the one that a restart raises."""


def copied(engine: CopyEngine) -> Capture:
    source, target = torch.arange(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    capture = engine.start((), [(source, [target])], {}, lambda done: None, lambda: None)
    capture.finished.wait()
    assert torch.equal(source, target)
    return capture


@pytest.mark.parametrize("ends_first", [True, False])
def test_an_interrupted_close_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch, ends_first: bool) -> None:
    """Reproduce seed 2180 of the simulation: a rank died while the job ended, and another rank waited forever."""
    engine = copy_engine(CpuDevice())
    copied(engine)
    thread = engine._thread
    assert thread is not None

    def interrupted(*_: object) -> None:
        monkeypatch.undo()
        if ends_first:
            thread.join()
        raise Interrupted

    monkeypatch.setattr(thread, "join", interrupted)
    with pytest.raises(Interrupted):
        engine.close()
    settled = threading.Thread(target=engine.settle, daemon=True)
    settled.start()
    settled.join(10)
    assert not settled.is_alive()
    copied(engine)
    engine.close()


def test_a_failure_of_one_moment_is_forgotten_with_its_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = copy_engine(CpuDevice())
    source, target = torch.arange(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)

    def fails(done: Capture) -> None:
        raise MemoryError

    engine.start((), [(source, [target])], {}, fails, lambda: None).finished.wait()
    with pytest.raises(MemoryError):
        copied(engine)
    engine.settle()
    engine.forget_error()
    copied(engine)
    engine.close()
