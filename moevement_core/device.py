"""Interface to the device of a process: streams, events, pinned host memory and memory use.

The engine and the Megatron binding use this interface instead of ``torch.cuda``, so one code path serves machines with
and without an NVIDIA GPU. On the CPU, a stream stands for the calling thread, and an event is a reading of the clock.
There, work is already done when the call that issues it returns, so the calls that wait for work return at once.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import resource
import socket
import time
import weakref
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import psutil
import torch

MOST_AT_ONCE = 2 << 30
"""Most bytes of host memory that a caller should allocate in one call, if the caller can use several pieces instead.

All ranks of a node together page-lock only some GB/s. A larger call may take a minute, and a thread that stays in one
call for a minute counts as hung.
"""


class DeviceEvent(ABC):
    """Event of a device, like a CUDA event: a mark between earlier and later work of a stream."""

    @abstractmethod
    def record(self, stream: Any = None) -> None:
        """Record this event after the work issued so far on ``stream`` (default: the current stream)."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the calling thread until the work before this event in the stream is done."""

    @abstractmethod
    def order_before(self, stream: Any = None) -> None:
        """Order later work of ``stream`` (default: the current stream) after this event, without blocking a thread."""

    @abstractmethod
    def query(self) -> bool:
        """Return True if the work before this event in the stream is done; never blocks."""

    @abstractmethod
    def elapsed_ms(self, end: DeviceEvent) -> float:
        """Return the milliseconds from this event to ``end``.

        Both events must be made with ``timing=True`` (:meth:`Device.event`) and be recorded.
        """


class Device(ABC):
    """Interface to the device of this process: an NVIDIA GPU, or the CPU on a machine without one."""

    kind: str
    torch_device: torch.device

    @property
    def pci_address(self) -> str | None:
        """Address of this device on the PCI bus, as ``0000:1b:00.0``; None on the CPU."""
        return None

    @abstractmethod
    def stream(self) -> Any:
        """Return a new stream, whose work runs beside the work of other streams."""

    @abstractmethod
    def current_stream(self) -> Any:
        """Return the stream on which the calling thread issues its work."""

    @abstractmethod
    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context manager that issues the work of its ``with`` block on ``stream``."""

    @abstractmethod
    def event(self, timing: bool = False, *, sleeps: bool = False) -> DeviceEvent:
        """Return a new event.

        Args:
            timing: True if :meth:`DeviceEvent.elapsed_ms` will use the event.
            sleeps: True if a thread that waits for the event sleeps, as a background thread should. False if the thread
                spins: it then occupies a processor, and returns from the wait about 50 microseconds sooner.
        """

    @abstractmethod
    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy ``source`` into ``target``, a tensor of the same size, on the current stream.

        On a GPU the call may return before the copy is done.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Block the calling thread until all work of this device is done."""

    @abstractmethod
    def use_in_this_thread(self) -> None:
        """Make this the current device of the calling thread; every new thread begins with the host's first device."""

    @abstractmethod
    def host_empty(self, nbytes: int) -> torch.Tensor:
        """Return ``nbytes`` of host memory as uint8, page-locked if that makes copies from and to the device faster.

        The memory begins at a page boundary. If this process forks later, the kernel does not copy the memory, and the
        new process must not use it; :func:`shared_memory` and :func:`parent_memory` give the reasons.

        Raises:
            RuntimeError: the host has too little memory, or cannot page-lock it.
        """

    @abstractmethod
    def memory_bytes(self) -> int:
        """Return the bytes of device memory that this process uses (on the CPU: its resident set)."""

    @abstractmethod
    def release_cached(self) -> int:
        """Free the device memory that torch caches, and return the bytes of device memory that are then free.

        On the CPU nothing is freed, and the result is the memory that the host has available.
        """

    @abstractmethod
    def peak_memory_bytes(self) -> int:
        """Return the largest :meth:`memory_bytes` of this process so far."""


def shared_memory(nbytes: int) -> torch.Tensor:
    """Return ``nbytes`` of zeroed host memory as uint8, in whole pages of a separate, shared mapping.

    The mapping is shared because a rank forks workers that load data. The kernel would copy the pages of a private
    mapping, at one of two moments:

    - At the fork, if the pages are locked for a device. Each worker then costs the time and memory of a copy of all
      snapshots.
    - When this process next writes to a page. From then on, this process uses the copy, and the device still writes
      to the old page.

    With a shared mapping, this process and its workers keep using the same pages.

    Raises:
        RuntimeError: the host has too little memory.
    """
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(_mapping(nbytes, mmap.MAP_SHARED), dtype=torch.uint8)[:nbytes]


def parent_memory(nbytes: int) -> torch.Tensor:
    """Return ``nbytes`` of zeroed host memory as uint8, in huge pages that a forked process does not get.

    The memory is a private mapping, because a shared mapping has pages of 4 KiB. The driver page-locks huge pages
    several times as fast as small pages (check E2 of ``benchmarks.gpu``). A forked process does not get the private
    mapping, so the kernel never copies its pages. The docstring of :func:`shared_memory` says which problems copies
    cause.

    Raises:
        RuntimeError: the host has too little memory.
    """
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    mapped = _mapping(nbytes, mmap.MAP_PRIVATE)
    mapped.madvise(mmap.MADV_DONTFORK)
    with suppress(OSError):  # a kernel without huge pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=torch.uint8)[:nbytes]


def _mapping(nbytes: int, kind: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, flags=kind | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise RuntimeError(f"{nbytes} bytes of host memory cannot be mapped: {error.strerror}") from None


class _CpuStream:
    """Stream of the CPU: the calling thread, whose issued work is always done."""

    def wait_stream(self, stream: Any) -> None:
        """Return at once, because issued work is already done."""

    def wait_event(self, event: Any) -> None:
        """Return at once, because issued work is already done."""

    def synchronize(self) -> None:
        """Return at once, because issued work is already done."""

    def query(self) -> bool:
        """Return True, because issued work is already done."""
        return True


class _CpuEvent(DeviceEvent):
    def __init__(self) -> None:
        self._recorded_s: float | None = None

    def record(self, stream: Any = None) -> None:
        self._recorded_s = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def order_before(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_ms(self, end: DeviceEvent) -> float:
        assert isinstance(end, _CpuEvent)
        if self._recorded_s is None or end._recorded_s is None:
            raise RuntimeError("elapsed_ms needs two recorded events; call record() on both first")
        return (end._recorded_s - self._recorded_s) * 1e3


class CpuDevice(Device):
    """Device of a machine without an accelerator."""

    kind = "cpu"
    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        self._stream = _CpuStream()

    def stream(self) -> _CpuStream:
        return _CpuStream()

    def current_stream(self) -> _CpuStream:
        return self._stream

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext(stream)

    def event(self, timing: bool = False, *, sleeps: bool = False) -> DeviceEvent:
        return _CpuEvent()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def synchronize(self) -> None:
        pass

    def use_in_this_thread(self) -> None:
        pass

    def host_empty(self, nbytes: int) -> torch.Tensor:
        return shared_memory(nbytes)

    def memory_bytes(self) -> int:
        return int(psutil.Process().memory_info().rss)

    def release_cached(self) -> int:
        return int(psutil.virtual_memory().available)

    def peak_memory_bytes(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class _CudaEvent(DeviceEvent):
    def __init__(self, timing: bool, *, sleeps: bool) -> None:
        self._event = torch.cuda.Event(enable_timing=timing, blocking=sleeps)

    def record(self, stream: Any = None) -> None:
        self._event.record(stream or torch.cuda.current_stream())

    def synchronize(self) -> None:
        self._event.synchronize()

    def order_before(self, stream: Any = None) -> None:
        (stream or torch.cuda.current_stream()).wait_event(self._event)

    def query(self) -> bool:
        return bool(self._event.query())

    def elapsed_ms(self, end: DeviceEvent) -> float:
        assert isinstance(end, _CudaEvent)
        return float(self._event.elapsed_time(end._event))


class CudaDevice(Device):
    """CUDA device that was the current one when this object was created."""

    kind = "cuda"

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())

    @property
    def pci_address(self) -> str:
        properties: Any = torch.cuda.get_device_properties(self.torch_device)
        return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.torch_device)

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.torch_device)

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def event(self, timing: bool = False, *, sleeps: bool = False) -> DeviceEvent:
        return _CudaEvent(timing, sleeps=sleeps)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def use_in_this_thread(self) -> None:
        torch.cuda.set_device(self.torch_device)

    def host_empty(self, nbytes: int) -> torch.Tensor:
        # Torch's allocator of pinned memory rounds up to a power of two, and never frees memory.
        self.use_in_this_thread()  # A background thread would otherwise use the host's first device.
        memory = parent_memory(nbytes)
        if nbytes:
            runtime: Any = torch.cuda.cudart()
            address = memory.data_ptr()
            assert address % mmap.PAGESIZE == 0
            if (error := int(runtime.cudaHostRegister(address, nbytes, 0))) != 0:
                clear_last_error()
                raise RuntimeError(f"{nbytes} bytes of host memory cannot be page-locked: CUDA error {error}")
            weakref.finalize(memory, runtime.cudaHostUnregister, address)  # Views of the memory keep it locked.
        return memory

    def memory_bytes(self) -> int:
        return int(torch.cuda.memory_allocated(self.torch_device))

    def release_cached(self) -> int:
        gc.collect()  # Objects of an interrupted step refer to each other, so only the collector frees them.
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    def peak_memory_bytes(self) -> int:
        return int(torch.cuda.max_memory_allocated(self.torch_device))


def clear_last_error(loaded: Path = Path("/proc/self/maps")) -> bool:
    """Clear the last error of this thread in the CUDA runtime.

    The runtime keeps an error until a call reads it. If nothing else reads it, torch does so after its next kernel, and
    raises it as an error of that kernel. Torch's binding of the CUDA runtime has no function that reads the error, so
    this function calls the runtime's library itself.

    Args:
        loaded: file in which the system lists the libraries of this process.

    Returns:
        True if this process has loaded a CUDA runtime.
    """
    names = {line.split()[-1] for line in loaded.read_text().splitlines() if "libcudart.so" in line}
    for name in names:
        ctypes.CDLL(name).cudaGetLastError()
    return bool(names)


def release_cached_memory() -> int | None:
    """Free device memory that torch caches, so that NCCL, which does not allocate through torch, can use the memory.

    Returns:
        Bytes of device memory that are then free; None if this process has not used a device yet.
    """
    if torch.cuda.is_available() and not torch.cuda.is_initialized():
        return None  # The first call of CUDA would occupy a device, which may belong to another rank.
    return current_device().release_cached()


def current_device() -> Device:
    """Return the device of this process: the current CUDA device, or the CPU if torch sees no CUDA."""
    return CudaDevice() if torch.cuda.is_available() else CpuDevice()


def visible_devices() -> tuple[str, ...]:
    """Return the identities of the accelerators that this process sees, in the order of their numbers.

    A device has one identity in all processes, even if they number devices differently. The function creates no CUDA
    context, so it takes no device memory.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return tuple(_identity(number) for number in range(count))


def _identity(number: int) -> str:
    """Return a device's UUID in the form of NVML, or host name and number if torch does not know the UUID."""
    if (uuid := getattr(torch.cuda.get_device_properties(number), "uuid", None)) is not None:
        return f"GPU-{uuid}"
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return f"{socket.gethostname()}/{visible[number] if number < len(visible) and visible[number] else number}"
