"""Copies of live state to page-locked host memory, by the engine that takes snapshots, alone and beside products that keep the
GPU busy: bandwidth, how much longer the products take, and how long a step would have waited.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from moevement_core.device import Device, current_device
from moevement_core.snapshot.copies import CopyEngine, copy_engine

MEGABYTES = (64, 512, 2048)
ROUNDS = 7


def measure() -> dict[str, Any]:
    """Medians over rounds, each of which has every case once."""
    device = current_device()
    rows = []
    for megabytes in MEGABYTES if device.kind == "cuda" else MEGABYTES[:1]:
        engine = copy_engine(device)
        nbytes = megabytes << 20
        source = torch.zeros(nbytes, dtype=torch.uint8, device=device.torch_device)
        target = device.host_empty(nbytes)
        target.zero_()
        work = _work(device)
        alone_s, restore_s, busy_s, beside_s, stall_s, copy_s = [], [], [], [], [], []
        for _ in range(ROUNDS):
            alone_s.append(_copied(engine, source, target))
            restore_s.append(_timed(device, partial(source.copy_, target, non_blocking=True)))
            busy_s.append(_timed(device, work))
            began = time.perf_counter()
            capture = engine.start((), [(source, [target])], {}, lambda done: None, lambda: None)
            work()
            device.current_stream().synchronize()  # not the copies' own
            stall_s.append(capture.wait_copied())
            beside_s.append(time.perf_counter() - began)
            capture.finished.wait()
            copy_s.append(capture.copy_s)
        engine.close()
        rows.append(
            [
                f"{megabytes} MiB", _rate(nbytes, alone_s), _rate(nbytes, restore_s), _rate(nbytes, copy_s),
                f"{1e3 * statistics.median(busy_s):.2f} ms",
                f"{statistics.median(beside_s) / statistics.median(busy_s):.3f}",
                f"{1e3 * statistics.median(stall_s):.2f} ms",
            ]
        )  # fmt: skip
    header = ["size", "to the host", "back", "to the host beside products", "products alone", "beside copies", "stall"]
    return {"device": device.kind, "header": header, "rows": rows}


def _work(device: Device) -> Callable[[], object]:
    """About 50 ms of products on a Hopper GPU."""
    size = 8192 if device.kind == "cuda" else 256
    dtype = torch.bfloat16 if device.kind == "cuda" else torch.float32
    left, right = (torch.randn(size, size, device=device.torch_device, dtype=dtype) for _ in range(2))

    def products() -> None:
        for _ in range(32):
            torch.mm(left, right)

    products()
    return products


def _copied(engine: CopyEngine, source: torch.Tensor, target: torch.Tensor) -> float:
    capture = engine.start((), [(source, [target])], {}, lambda done: None, lambda: None)
    capture.finished.wait()
    return capture.copy_s


def _timed(device: Device, function: Callable[[], object]) -> float:
    device.synchronize()
    began = time.perf_counter()
    function()
    device.synchronize()
    return time.perf_counter() - began


def _rate(nbytes: int, seconds: list[float]) -> str:
    return f"{nbytes / statistics.median(seconds) / 1e9:.1f} GB/s"
