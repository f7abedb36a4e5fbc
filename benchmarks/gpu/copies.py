"""Checks of copies of live state to page-locked host memory by the copy engine of snapshots.

The checks measure how these copies delay a small copy that training makes, how they slow kernels, their rate from each
NUMA node, and the processor time of the thread that waits for them.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.check import Report
from benchmarks.gpu.processes import call
from moevement_core.device import Device, current_device
from moevement_core.snapshot.copies import Capture, CopyEngine, copy_engine

CONNECTIONS, COPY_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_MAX_COPY_CONNECTIONS"
QUEUES: dict[str, dict[str, str | None]] = {
    "1 connection": {CONNECTIONS: "1", COPY_CONNECTIONS: None},
    "8 connections": {CONNECTIONS: "8", COPY_CONNECTIONS: None},
    "32 connections": {CONNECTIONS: "32", COPY_CONNECTIONS: None},
    "1 connection, 8 for copies": {CONNECTIONS: "1", COPY_CONNECTIONS: "8"},
}
CHUNK_BYTES = 8 << 20
ELEMENTS = 64
"""Number of elements of the small copy. A token dispatcher makes such a copy in every layer."""
WAITS_FOR_COPY = 0.25
"""Share of a snapshot's copying time. A small copy that takes more than this share counts as delayed by the snapshot."""
CORE_SHARE = 0.5
"""Share of a copy's duration. A waiting thread that uses more processor time counts as burning a core."""
ROUNDS = 5


def latency(report: Report) -> None:
    """Time a small copy while the engine copies a snapshot, for each setting of the driver's queues."""
    nbytes = (2 << 30) if torch.cuda.is_available() else (16 << 20)
    latest = {}
    for name, environment in QUEUES.items() if torch.cuda.is_available() else list(QUEUES.items())[:1]:
        for kind, chunk_bytes in (("whole", nbytes), ("paced", CHUNK_BYTES)):
            case = call(latency_case, 30, environment, nbytes=nbytes, chunk_bytes=chunk_bytes)
            latest[name, kind] = case
            for what, unit in (("quiet", "ms"), ("median", "ms"), ("longest", "ms"), ("copy", "ms")):
                report.figure(f"{name}, {kind}: {what}", case[what], unit)
    if torch.cuda.is_available():
        for (name, kind), case in latest.items():
            if kind == "whole":
                holds = case["longest"] < WAITS_FOR_COPY * case["copy"]
                report.claim(f"a small copy does not wait for the snapshot's, {name}", holds)


def latency_case(nbytes: int, chunk_bytes: int) -> dict[str, float]:
    """Return the milliseconds of a small copy alone, of small copies beside a snapshot, and of the snapshot."""
    device = current_device()
    engine, stream = copy_engine(device), device.stream()
    source, target = _buffers(device, nbytes)
    small = torch.zeros(ELEMENTS, dtype=torch.int64, device=device.torch_device)
    on_host = device.host_empty(small.nbytes).view(torch.int64)

    def small_copy() -> float:
        began = time.perf_counter()
        with device.use_stream(stream):
            on_host.copy_(small, non_blocking=True)
            event = device.event()
            event.record(stream)
        event.synchronize()
        return 1e3 * (time.perf_counter() - began)

    copy_in_chunks(engine, source, target, chunk_bytes)  # warm-up
    quiet = statistics.median(small_copy() for _ in range(20))
    beside: list[float] = []
    began = time.perf_counter()
    thread = threading.Thread(target=copy_in_chunks, args=(engine, source, target, chunk_bytes))
    thread.start()
    time.sleep(0.001)
    while thread.is_alive() or not beside:
        beside.append(small_copy())
    copy_ms = 1e3 * (time.perf_counter() - began)
    engine.close()
    return {"quiet": quiet, "median": statistics.median(beside), "longest": max(beside), "copy": copy_ms}


def copy_in_chunks(engine: CopyEngine, source: torch.Tensor, target: torch.Tensor, chunk_bytes: int) -> None:
    """Copy with the engine, with at most two chunks under way, and return after the last chunk."""
    under_way: list[Capture] = []
    for from_, to in zip(source.split(chunk_bytes), target.split(chunk_bytes), strict=True):
        under_way.append(_start(engine, from_, to))
        if len(under_way) > 1:
            under_way.pop(0).wait_copied()
    for capture in under_way:
        capture.wait_copied()


def numa(report: Report) -> None:
    """Measure rates of copies and slow-downs of kernels, with a process on each NUMA node."""
    for node, cpus in _nodes().items():
        case = call(numa_case, 45, cpus=cpus)
        for name, (value, unit) in case.items():
            report.figure(f"node {node}: {name}", value, unit)
    if torch.cuda.is_available():
        report.figure("memory node of GPU 0", _node_of_device())


def numa_case(cpus: list[int]) -> dict[str, tuple[float, str]]:
    """Run on the processors ``cpus``. Return rates of copies, alone and beside work, and the slow-down of the work."""
    os.sched_setaffinity(0, cpus)
    device = current_device()
    nbytes = (2 << 30) if device.kind == "cuda" else (16 << 20)
    engine = copy_engine(device)
    source, target = _buffers(device, nbytes)
    to_host = _median(lambda: copy_s(engine, source, target))
    back = _median(lambda: timed(device, partial(source.copy_, target, non_blocking=True)))
    figures = {"to the host": (nbytes / to_host / 1e9, "GB/s"), "back": (nbytes / back / 1e9, "GB/s")}
    for name, work in (("products", products(device)), ("memory-bound kernels", _memory_bound(device))):
        alone, beside, copied, stalls = [], [], [], []
        for _ in range(ROUNDS):
            alone.append(timed(device, work))
            began = time.perf_counter()
            capture = _start(engine, source, target)
            work()
            device.current_stream().synchronize()  # wait for the work, not for the copies on their own stream
            beside.append(time.perf_counter() - began)
            stalls.append(capture.wait_copied())
            capture.finished.wait()
            copied.append(capture.copy_s)
        figures[f"to the host beside {name}"] = (nbytes / statistics.median(copied) / 1e9, "GB/s")
        figures[f"{name} beside copies over alone"] = (statistics.median(beside) / statistics.median(alone), "")
        figures[f"stall after {name}"] = (1e3 * statistics.median(stalls), "ms")
    engine.close()
    return figures


def waiting(report: Report) -> None:
    """Measure the processor time of waiting for a copy, in the engine's thread and with a torch event."""
    device = current_device()
    nbytes = (4 << 30) if device.kind == "cuda" else (16 << 20)
    engine = copy_engine(device)
    source, target = _buffers(device, nbytes)
    capture = _start(engine, source, target)
    capture.finished.wait()
    engine.close()
    report.figure("copy of the engine", capture.copy_s, "s")
    report.figure("processor time of its thread", capture.copy_cpu_s / (nbytes / 1e9), "s/GB")
    if device.kind != "cuda":
        return  # without a GPU, the engine's thread makes the copy itself
    report.claim("the engine's thread does not burn a core", capture.copy_cpu_s < CORE_SHARE * capture.copy_s)
    for is_blocking in (False, True):
        event = torch.cuda.Event(blocking=is_blocking)
        target.copy_(source, non_blocking=True)
        event.record()
        began = time.thread_time()
        event.synchronize()
        seconds = (time.thread_time() - began) / (nbytes / 1e9)
        report.figure(f"torch event, blocking={is_blocking}", seconds, "s/GB")


def _buffers(device: Device, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device.torch_device)
    target = device.host_empty(nbytes)
    target.zero_()
    return source, target


def _start(engine: CopyEngine, source: torch.Tensor, target: torch.Tensor) -> Capture:
    return engine.start((), [(source, [target])], {}, lambda done: None, lambda: None)


def copy_s(engine: CopyEngine, source: torch.Tensor, target: torch.Tensor) -> float:
    """Return the seconds that the engine's copy takes, by the clock of the device."""
    capture = _start(engine, source, target)
    capture.finished.wait()
    return capture.copy_s


def products(device: Device) -> Callable[[], object]:
    """Return a function that runs products for about 50 ms on a Hopper GPU."""
    size = 8192 if device.kind == "cuda" else 256
    dtype = torch.bfloat16 if device.kind == "cuda" else torch.float32
    left, right = (torch.randn(size, size, device=device.torch_device, dtype=dtype) for _ in range(2))

    def work() -> None:
        for _ in range(32):
            torch.mm(left, right)

    work()
    return work


def _memory_bound(device: Device) -> Callable[[], object]:
    values = torch.zeros((1 << 29) if device.kind == "cuda" else (1 << 18), device=device.torch_device)

    def work() -> None:
        for _ in range(32):
            values.add_(1.0)

    work()
    return work


def timed(device: Device, function: Callable[[], object]) -> float:
    """Return the seconds until the device has finished the work that ``function`` issues."""
    device.synchronize()
    began = time.perf_counter()
    function()
    device.synchronize()
    return time.perf_counter() - began


def _median(sample: Callable[[], float]) -> float:
    return statistics.median(sample() for _ in range(ROUNDS))


def _nodes() -> dict[str, list[int]]:
    """Return the processors that this process may use, by NUMA node."""
    allowed, nodes = os.sched_getaffinity(0), {}
    for path in sorted(Path("/sys/devices/system/node").glob("node[0-9]*/cpulist")):
        if cpus := sorted(allowed & _numbers(path.read_text())):
            nodes[path.parent.name.removeprefix("node")] = cpus
    return nodes or {"0": sorted(allowed)}


def _numbers(text: str) -> set[int]:
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def _node_of_device() -> str:
    properties: Any = torch.cuda.get_device_properties(0)
    place = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    path = Path("/sys/bus/pci/devices", place, "numa_node")
    return path.read_text().strip() if path.exists() else "unknown"
