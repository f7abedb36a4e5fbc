"""Check of a spare that takes over the GPU of a killed process.

The check measures the seconds from SIGKILL until another process can allocate the same amount of memory, with an
existing CUDA context and with a new one.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.gpu.check import Report
from benchmarks.gpu.processes import Process
from moevement_core.device import current_device
from moevement_core.launching.children import no_orphans_left
from moevement_core.launching.orphans import Orphans
from moevement_core.util.environment import MEMBER_ENV
from moevement_core.util.host_memory import node_memory

SHARE = 0.6
"""Share of the GPU's memory that each process takes. It is above a half, so two processes cannot both have it."""
LOCKED_BYTES = 32 << 30
UP_S, TAKEN_S = 40.0, 15.0
"""Limits in seconds: for the start of each process, and from the kill until the spare has the memory."""
BUILT_S = 5.0
"""Seconds that a replacement needs before it allocates memory. The memory must be free by then."""


def takeover(report: Report) -> None:
    """Kill a process that holds most of the device's memory, in four situations.

    This process ends the children of the killed process, as the supervisor of a node does.
    """
    locked_bytes = min(LOCKED_BYTES, int(0.4 * node_memory().nbytes))
    cases = {
        "spare with a context": (True, False, 0),
        "spare without": (False, False, 0),
        "a forked child holds the device files": (True, True, 0),
        "page-locked host memory": (True, False, locked_bytes),
    }
    for name, (is_warm, forks, locked) in cases.items():
        seconds = _taken_over(is_warm, forks, locked)
        report.figure(name, seconds if seconds is not None else f"not in {TAKEN_S:g} s", "s")
        report.claim(f"{name}: free before a replacement is built", seconds is not None and seconds < BUILT_S)


def _taken_over(is_warm: bool, forks: bool, locked_bytes: int) -> float | None:
    orphans = Orphans()
    with tempfile.TemporaryDirectory() as folder:
        with (
            no_orphans_left(),  # adopts the children of the killed process
            Process(
                hold, {"folder": folder, "forks": forks, "locked_bytes": locked_bytes}, {MEMBER_ENV: "0"}
            ) as holder,
            Process(take, {"folder": folder, "is_warm": is_warm}) as spare,
        ):
            _wait_for(Path(folder, "held"), UP_S, holder)
            _wait_for(Path(folder, "ready"), UP_S, spare)
            began = time.perf_counter()
            os.kill(holder.pid, signal.SIGKILL)
            while not orphans.release_device(0, (holder.pid, spare.pid)):
                time.sleep(0.01)
            Path(folder, "go").touch()
            try:
                spare.result(TAKEN_S)
                return time.perf_counter() - began
            except TimeoutError:
                return None


def _wait_for(path: Path, limit_s: float, process: Process) -> None:
    deadline = time.monotonic() + limit_s
    while not path.exists():
        if time.monotonic() > deadline:
            raise RuntimeError(f"a process did not start within {limit_s:g} s: {process.tail()}")
        time.sleep(0.01)


def hold(folder: str, forks: bool, locked_bytes: int) -> None:
    """Hold most of the device's memory until the kill."""
    memory = torch.zeros(_bytes(), dtype=torch.uint8, device="cuda")
    locked = current_device().host_empty(locked_bytes)
    locked.zero_()
    torch.cuda.synchronize()
    if forks and os.fork() == 0:
        time.sleep(600)
        os._exit(0)
    Path(folder, "held").touch()
    while memory is not None:
        time.sleep(1)


def take(folder: str, is_warm: bool) -> None:
    """Allocate the same amount of memory as soon as the other process is killed."""
    if is_warm:
        torch.zeros(1, device="cuda")
    Path(folder, "ready").touch()
    while not Path(folder, "go").exists():
        time.sleep(0.001)
    while True:
        try:
            torch.zeros(_bytes(), dtype=torch.uint8, device="cuda")
            torch.cuda.synchronize()
            return
        except torch.OutOfMemoryError:
            time.sleep(0.01)


def _bytes() -> int:
    return int(SHARE * torch.cuda.get_device_properties(0).total_memory)
