"""Check of digests of the whole state on its device: launches, time, memory, and slow-down of training."""

from __future__ import annotations

import statistics
import time

import torch

from benchmarks.gpu.check import Report
from benchmarks.gpu.copies import products, timed
from moevement_core.device import current_device
from moevement_core.snapshot.whole import begin_whole

HOST_S = 0.05
"""Seconds for which a digest of the whole state may occupy the training thread."""


def digests(report: Report) -> None:
    """Digest the state of a rank that holds 10 GiB, alone and while the device multiplies matrices."""
    device = current_device()
    is_gpu = device.kind == "cuda"
    nbytes = (10 << 30) if is_gpu else (16 << 20)
    state = {"operator": [torch.zeros(nbytes // 16, device=device.torch_device) for _ in range(4)]}
    begin_whole(state)()
    device.synchronize()
    before = device.peak_memory_bytes()
    began = time.perf_counter()
    finish = begin_whole(state)
    host_s = time.perf_counter() - began
    finish()
    device.synchronize()
    report.figure(f"host, until {nbytes / 2**30:g} GiB are issued", 1e3 * host_s, "ms")
    report.figure("until the digest is there", 1e3 * (time.perf_counter() - began), "ms")
    report.figure("memory beside the state", (device.peak_memory_bytes() - before) / 2**20, "MiB")
    work = products(device)
    alone = statistics.median(timed(device, work) for _ in range(5))
    beside = []
    for _ in range(5):
        stream = device.stream()
        device.synchronize()
        began = time.perf_counter()
        with device.use_stream(stream):
            finish = begin_whole(state)
        work()
        device.current_stream().synchronize()
        beside.append(time.perf_counter() - began)
        finish()
    report.figure("products beside it, longer by", 1e3 * (statistics.median(beside) - alone), "ms")
    if is_gpu:
        report.figure("launches", _launches(state))
        report.claim("the training thread issues it quickly", host_s < HOST_S)


def _launches(state: dict[str, list[torch.Tensor]]) -> int:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        begin_whole(state)()
        torch.cuda.synchronize()
    return sum(event.count for event in profiled.key_averages())
