"""The device interface works on this machine's device: a GPU if there is one, else the CPU."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moevement_core.device import (
    CpuDevice,
    CudaDevice,
    clear_last_error,
    current_device,
    parent_memory,
    release_cached_memory,
    shared_memory,
)


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
    # Memory that earlier tests freed stays resident in malloc, and a tensor that fits into it adds nothing.
    ctypes.CDLL(None).malloc_trim(0)
    before = device.memory_bytes()
    held = torch.ones(128 << 20, dtype=torch.uint8, device=device.torch_device)
    assert device.memory_bytes() >= before + (64 << 20)
    assert device.peak_memory_bytes() >= device.memory_bytes() - (1 << 20)
    del held


def test_host_memory_is_of_whole_pages_that_a_fork_shares() -> None:
    host = CpuDevice().host_empty(10)
    assert (host.dtype, host.numel(), host.is_cuda) == (torch.uint8, 10, False)
    assert host.data_ptr() % mmap.PAGESIZE == 0
    if (pid := os.fork()) == 0:
        host[3] = 7
        os._exit(0)
    os.waitpid(pid, 0)
    assert host.tolist() == [0, 0, 0, 7, 0, 0, 0, 0, 0, 0]
    assert CpuDevice().host_empty(0).numel() == 0


def test_memory_that_cannot_be_had_is_an_error_that_callers_expect() -> None:
    with pytest.raises(RuntimeError, match=str(1 << 60)):
        CpuDevice().host_empty(1 << 60)


SIZE = 64 << 20
IO_URING_SETUP, IO_URING_REGISTER, REGISTER_BUFFERS = 425, 427, 0


def lock_pages(memory: torch.Tensor) -> int:
    """Lock pages as a driver does, through io_uring, whose buffers are pinned; return the descriptor of the lock."""
    libc = ctypes.CDLL(None, use_errno=True)
    parameters = (ctypes.c_char * 120)()
    if (ring := libc.syscall(IO_URING_SETUP, 1, parameters)) < 0:
        pytest.skip("no io_uring here")
    buffer = (ctypes.c_uint64 * 2)(memory.data_ptr(), memory.nbytes)
    if libc.syscall(IO_URING_REGISTER, ring, REGISTER_BUFFERS, buffer, 1) < 0:
        os.close(ring)
        pytest.skip(f"pages cannot be locked here: {os.strerror(ctypes.get_errno())}")
    return int(ring)


def private_bytes_of_a_fork() -> int:
    """Return the bytes of private memory of a process that is forked now and does nothing."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        kilobytes = sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Dirty", "Private_Clean")))
        os.write(write, str(kilobytes * 1024).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        private_bytes = int(answer.read())
    os.waitpid(pid, 0)
    return private_bytes


def test_memory_of_the_parent_is_whole_pages_of_zeros() -> None:
    memory = parent_memory(10)
    assert (memory.dtype, memory.tolist()) == (torch.uint8, [0] * 10)
    assert memory.data_ptr() % mmap.PAGESIZE == 0
    assert parent_memory(0).numel() == 0
    with pytest.raises(RuntimeError, match=str(1 << 60)):
        parent_memory(1 << 60)


@pytest.mark.parametrize("allocate", [shared_memory, parent_memory, None])
def test_a_fork_copies_no_page_that_is_locked(allocate: Callable[[int], torch.Tensor] | None) -> None:
    """Check that a fork copies no locked page of snapshots. Otherwise each data worker would hold copies of them.

    The fork does copy locked pages of private memory (None), which shows that the measurement sees copies.
    """
    gc.collect()
    is_shared = allocate is not None
    memory = torch.empty(SIZE, dtype=torch.uint8) if allocate is None else allocate(SIZE)
    memory.zero_()
    before = private_bytes_of_a_fork()
    ring = lock_pages(memory)
    try:
        more = private_bytes_of_a_fork() - before
    finally:
        os.close(ring)
    assert (more < SIZE // 8) if is_shared else (more > SIZE // 2), more


def test_the_runtime_is_asked_for_its_last_error(tmp_path: Path) -> None:
    library, asked = tmp_path / "libcudart.so.0", tmp_path / "asked"
    source = f'#include <stdio.h>\nint cudaGetLastError(void) {{ fclose(fopen("{asked}", "w")); return 0; }}'
    if shutil.which("cc") is None:
        pytest.skip("no compiler here")
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-o", library, "-"], input=source, text=True, check=True)
    maps = tmp_path / "maps"
    maps.write_text(f"7f00-7f01 r-xp 00000000 00:00 1 {library}\n7f02-7f03 r--p 00000000 00:00 1 {library}\n")
    assert clear_last_error(maps)
    assert asked.exists()
    assert not clear_last_error(tmp_path / "asked"), "there is no runtime"


def test_memory_is_given_back_after_what_refers_to_it_was_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that garbage is collected before torch frees its cache. An interrupted step is in a reference cycle.

    Communicators allocate memory outside of torch, so torch must not keep what is free.
    """
    calls = list[str]()
    device = object.__new__(CudaDevice)
    device.torch_device = torch.device("cuda", 0)
    monkeypatch.setattr(gc, "collect", lambda: calls.append("collect"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda of: (7 << 30, 80 << 30))
    assert device.release_cached() == 7 << 30
    assert calls == ["collect", "empty"]


def test_no_device_is_taken_to_ask_for_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a process without a device initialises none, because it would take the device of another rank."""
    assert torch.cuda.is_available() or (release_cached_memory() or 0) > 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert release_cached_memory() is None
