"""A spare takes over the GPU of a process that is killed: seconds from SIGKILL until as much memory can be had by another
process that has its CUDA context already, and by one that makes it then.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import statistics
import time
from typing import Any

import torch

ROUNDS = 3
_SHARE = 0.6
"""Of the GPU's memory: two processes cannot have so much at once."""


def measure() -> dict[str, Any]:
    """Medians over rounds."""
    if not torch.cuda.is_available():
        return {"skipped": "needs a GPU"}
    rows = [
        [name, f"{statistics.median(_taken_over(is_warm) for _ in range(ROUNDS)):.2f} s"]
        for name, is_warm in (("with a context", True), ("without", False))
    ]
    return {"header": ["spare", "until it has the memory"], "rows": rows}


def _taken_over(is_warm: bool) -> float:
    context = multiprocessing.get_context("spawn")
    ready, spare_ready, go, taken = (context.Event() for _ in range(4))
    first = context.Process(target=_hold, args=(ready,))
    spare = context.Process(target=_take, args=(is_warm, spare_ready, go, taken))
    first.start()
    spare.start()
    try:
        if not (ready.wait(60) and spare_ready.wait(60)):
            raise RuntimeError("processes did not come up in a minute")
        began = time.perf_counter()
        assert first.pid is not None
        os.kill(first.pid, signal.SIGKILL)
        go.set()
        if not taken.wait(60):
            raise RuntimeError("the memory could not be had in a minute")
        return time.perf_counter() - began
    finally:
        for process in (first, spare):
            process.kill()
            process.join()


def _bytes() -> int:
    return int(_SHARE * torch.cuda.get_device_properties(0).total_memory)


def _hold(ready: Any) -> None:
    memory = torch.zeros(_bytes(), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    ready.set()
    while memory is not None:
        time.sleep(1)


def _take(is_warm: bool, ready: Any, go: Any, taken: Any) -> None:
    if is_warm:
        torch.zeros(1, device="cuda")
    ready.set()
    go.wait()
    while True:
        try:
            torch.zeros(_bytes(), dtype=torch.uint8, device="cuda")
            torch.cuda.synchronize()
            break
        except torch.OutOfMemoryError:
            time.sleep(0.01)
    taken.set()
