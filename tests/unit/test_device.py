"""The device interface on this machine's device; the same body serves a GPU where there is one."""

from __future__ import annotations

import ctypes

import torch

from moevement_core.device import CpuDevice, current_device


def test_copies_on_a_side_stream_are_there_after_its_event() -> None:
    device = current_device()
    source = torch.arange(1 << 16, dtype=torch.uint8, device=device.torch_device)
    host = device.host_empty(source.numel())
    stream, start, end = device.stream(), device.event(timing=True), device.event(timing=True)
    start.record()
    stream.wait_stream(device.current_stream())
    with device.use_stream(stream):
        host.copy_(source, non_blocking=True)
        end.record(stream)
    end.synchronize()
    assert end.query()
    assert torch.equal(host, source.cpu())
    assert start.elapsed_ms(end) >= 0
    device.synchronize()


def test_memory_figures_grow_with_what_is_held() -> None:
    device = current_device()
    # What earlier tests have given back to malloc is resident; tensors that fit into it add nothing.
    ctypes.CDLL(None).malloc_trim(0)
    before = device.memory_bytes()
    held = torch.ones(128 << 20, dtype=torch.uint8, device=device.torch_device)
    assert device.memory_bytes() >= before + (64 << 20)
    assert device.peak_memory_bytes() >= device.memory_bytes() - (1 << 20)
    del held


def test_host_memory_is_plain_where_no_gpu_is() -> None:
    host = CpuDevice().host_empty(10)
    assert host.dtype == torch.uint8
    assert host.numel() == 10
    assert not host.is_cuda
