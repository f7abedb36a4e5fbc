"""Checks of page-locked host memory for snapshots: the cost of locking, the effect of a fork, and a failed lock."""

from __future__ import annotations

import mmap
import os
import threading
import time
from typing import Any

import psutil
import torch

from benchmarks.gpu.check import Report
from benchmarks.gpu.copies import copy_s
from benchmarks.gpu.processes import call
from moevement_core.device import clear_last_error, current_device
from moevement_core.snapshot.copies import copy_engine
from moevement_core.util.host_memory import node_memory

LARGEST_SHARE = 0.4
"""Share of the host's memory that a check may lock."""
GAP_S = 1.0
"""Seconds for which page-locking may stop another thread. The lease of a rank is ten times as long."""
COPY_SHARE = 0.05
"""Share of the locked memory that may be copied for a forked process."""
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
SHARED = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS


def page_lock(report: Report) -> None:
    """Measure page-locking for several sizes and kinds of mapping: seconds, stops of another thread, new contexts."""
    if torch.cuda.is_available():
        kinds = {"private": PRIVATE, "private, huge pages": PRIVATE, "shared": SHARED}
        for name, flags in kinds.items():
            seconds = call(mapping_case, 30, nbytes=4 << 30, flags=flags, is_huge="huge" in name)
            report.figure(f"4 GiB, {name}: touched, locked", f"{seconds[0]:.2f}, {seconds[1]:.2f}", "s")
    sizes = [1 << 30, 8 << 30, 32 << 30] if torch.cuda.is_available() else [32 << 20]
    for nbytes in sizes:
        if nbytes > LARGEST_SHARE * node_memory().nbytes:
            report.figure(f"{nbytes >> 20} MiB", "not run: too large for this host")
            continue
        case = call(page_lock_case, 40, nbytes=nbytes)
        report.figure(f"{nbytes >> 20} MiB, ours: locked", case["lock_s"], "s")
        report.figure(f"{nbytes >> 20} MiB, ours: zeroed after it", case["zero_s"], "s")
        report.figure(f"{nbytes >> 20} MiB, ours: longest stop of another thread", case["gap_s"], "s")
        report.claim(f"another thread runs while {nbytes >> 20} MiB are locked", case["gap_s"] < GAP_S)
        report.claim("no other device gets a context", not case["others"])


def page_lock_case(nbytes: int) -> dict[str, Any]:
    """Lock memory in a thread that has not used the device yet, as threads that serve peers do."""
    device = current_device()
    if device.kind == "cuda":
        torch.zeros(1, device=device.torch_device)
    before = _used_on_devices()
    seconds: dict[str, Any] = {}

    def lock() -> None:
        began = time.perf_counter()
        memory = device.host_empty(nbytes)
        seconds["lock_s"] = time.perf_counter() - began
        began = time.perf_counter()
        memory.zero_()
        seconds["zero_s"] = time.perf_counter() - began

    thread = threading.Thread(target=lock)
    thread.start()
    longest, last = 0.0, time.perf_counter()
    while thread.is_alive():
        time.sleep(0.001)
        longest, last = max(longest, time.perf_counter() - last), time.perf_counter()
    thread.join()
    own = device.torch_device.index
    after = _used_on_devices()
    others = [number for number, used in after.items() if number != own and used > before[number] + (64 << 20)]
    return {**seconds, "gap_s": longest, "others": others}


def _used_on_devices() -> dict[int, int]:
    """Return the bytes in use on each device, without creating a context on it."""
    if not torch.cuda.is_available() or torch.cuda.device_count() == 1:
        return {}
    return {number: torch.cuda.device_memory_used(number) for number in range(torch.cuda.device_count())}


def mapping_case(nbytes: int, flags: int, is_huge: bool) -> tuple[float, float]:
    """Return the seconds of touching and of locking a mapping of this kind."""
    torch.zeros(1, device="cuda")
    mapped = mmap.mmap(-1, nbytes, flags=flags)
    if is_huge:
        mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapped, dtype=torch.uint8)
    began = time.perf_counter()
    memory.zero_()
    touched_s = time.perf_counter() - began
    began = time.perf_counter()
    _register(memory)
    return touched_s, time.perf_counter() - began


def _register(memory: torch.Tensor) -> None:
    runtime: Any = torch.cuda.cudart()
    if (error := int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))) != 0:
        clear_last_error()
        raise RuntimeError(f"{memory.nbytes} bytes cannot be page-locked: CUDA error {error}")


def fork(report: Report) -> None:
    """Fork a process with much page-locked memory, copy into this memory afterwards, and compare the result."""
    device = current_device()
    wanted = (8 << 30) if device.kind == "cuda" else (16 << 20)
    nbytes = min(wanted, int(LARGEST_SHARE * node_memory().nbytes) >> 20 << 20)
    for kind in ("ours", "private", "private, not forked") if device.kind == "cuda" else ("ours",):
        case = call(fork_case, 40, nbytes=nbytes, kind=kind)
        report.figure(f"{nbytes >> 20} MiB, {kind}: fork", case["fork_s"], "s")
        report.figure(f"{nbytes >> 20} MiB, {kind}: of the child alone", case["own_bytes"] / 2**20, "MiB")
        report.figure(f"{nbytes >> 20} MiB, {kind}: what the device wrote arrives", str(case["is_equal"]))
        if kind == "ours":
            report.claim("what the device writes after a fork arrives", case["is_equal"])
            report.claim("the child gets no copy", case["own_bytes"] < COPY_SHARE * nbytes + (64 << 20))


def fork_case(nbytes: int, kind: str) -> dict[str, Any]:
    """Fork, then copy. Return the seconds of the fork, the bytes that only the child has, and whether the copy is right."""
    device = current_device()
    if kind == "ours":
        memory = device.host_empty(nbytes)
    else:
        mapped = mmap.mmap(-1, nbytes, flags=PRIVATE)
        memory = torch.frombuffer(mapped, dtype=torch.uint8)
        torch.zeros(1, device="cuda")
        _register(memory)
        if "not forked" in kind:
            mapped.madvise(mmap.MADV_DONTFORK)
    memory.zero_()
    source = torch.full((nbytes,), 7, dtype=torch.uint8, device=device.torch_device)
    device.synchronize()
    began = time.perf_counter()
    if (child := os.fork()) == 0:
        time.sleep(60)
        os._exit(0)
    fork_s = time.perf_counter() - began
    try:
        memory[:: mmap.PAGESIZE] = 3  # the parent writes to every page
        engine = copy_engine(device)
        copy_s(engine, source, memory)
        engine.close()
        own_bytes = int(psutil.Process(child).memory_full_info().uss)
        return {"fork_s": fork_s, "own_bytes": own_bytes, "is_equal": bool((memory == 7).all())}
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def failed_page_lock(report: Report) -> None:
    """Lock a range that is already locked, and then launch a kernel, once with the error kept and once cleared."""
    device = current_device()
    memory = device.host_empty(1 << 20)
    runtime: Any = torch.cuda.cudart()
    for is_cleared in (False, True):
        error = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        if is_cleared:
            report.claim("the runtime that torch has loaded is found", clear_last_error())
        raised = _next_kernel_raises()
        report.figure(f"error of the lock, taken back: {is_cleared}", error)
        report.figure(f"the next kernel raises, taken back: {is_cleared}", str(raised))
        if is_cleared:
            report.claim("no kernel raises the error of a lock that failed", error != 0 and not raised)
    try:
        device.host_empty(2 * psutil.virtual_memory().total)
        report.figure("twice the memory of the host", "was locked")
    except RuntimeError as refused:
        report.figure("twice the memory of the host", str(refused))
        report.claim("no kernel raises after the memory was refused", not _next_kernel_raises())


def _next_kernel_raises() -> bool:
    try:
        torch.zeros(4, device="cuda").add_(1)
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
