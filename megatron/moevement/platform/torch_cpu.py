"""Implementation of ``torch.cuda`` for the CPU.

Megatron asks ``torch.cuda`` for devices, streams, memory figures and random states, builds tensors with
``device="cuda"``, and compares ``Tensor.type()`` with CUDA names. This module replaces each of these by the equivalent
for the CPU. ``torch.cuda.is_available()`` still returns False, and types such as ``torch.cuda.FloatTensor`` stay
unchanged, because Megatron makes decisions by them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import psutil
import torch

from megatron.moevement.patches import replace, wrap
from moevement_core.device import CpuDevice

_CPU = torch.device("cpu")


class Stream:
    """Stream that runs work in the calling thread, so every call returns with its work complete."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = _CPU
        self.cuda_stream = 0

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the least and the greatest priority; both are 0."""
        return (0, 0)

    def wait_stream(self, stream: Any) -> None:
        """Do nothing, because no work is pending."""

    def wait_event(self, event: Any) -> None:
        """Do nothing, because no work is pending."""

    def synchronize(self) -> None:
        """Do nothing, because no work is pending."""

    def query(self) -> bool:
        """Return True, because no work is pending."""
        return True

    def record_event(self, event: Any = None) -> TimedEvent:
        """Record ``event``, or a new event if it is None, on this stream, and return the event."""
        event = event or TimedEvent()
        event.record(self)
        return event


class TimedEvent:
    """Event that stores the time at which it was recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._event = CpuDevice().event(timing=True)

    def record(self, stream: Any = None) -> None:
        """Store the current time in this event."""
        self._event.record()

    def wait(self, stream: Any = None) -> None:
        """Do nothing, because no work is pending."""

    def synchronize(self) -> None:
        """Do nothing, because no work is pending."""

    def query(self) -> bool:
        """Return True, because no work is pending."""
        return True

    def elapsed_time(self, end: TimedEvent) -> float:
        """Return the milliseconds from this event to the event ``end``."""
        return self._event.elapsed_ms(end._event)


_DEFAULT_STREAM = Stream()


def install() -> None:
    """Replace the names in ``torch`` that the functions below list; idempotent."""
    _answer_devices_and_streams()
    _answer_memory()
    _answer_random_states()
    _redirect_tensors()


def _nothing() -> Callable[..., None]:
    """Return a new function that does nothing.

    Each replaced name gets its own, because ``torch.compile`` refuses one function under two names of torch.
    """
    return lambda *args, **kwargs: None


def _answer_devices_and_streams() -> None:
    properties = SimpleNamespace(
        name="cpu",
        # Below architecture 10, Megatron requires CUDA_DEVICE_MAX_CONNECTIONS, which orders kernels on a GPU.
        major=10,
        minor=0,
        total_memory=psutil.virtual_memory().total,
        multi_processor_count=torch.get_num_threads(),
    )
    answers: list[tuple[str, Any, str]] = [
        ("current_device", lambda: _CPU, "Megatron passes it as device= of new tensors"),
        ("set_device", _nothing(), "Megatron calls it with the local rank"),
        ("device_count", lambda: 1, "Megatron builds groups and seeds trackers only if it is positive"),
        ("synchronize", _nothing(), "CPU work is done when the call returns"),
        ("get_device_properties", lambda *a, **k: properties, "Megatron reads architecture and memory size"),
        ("get_device_capability", lambda *a, **k: (10, 0), "Megatron reads the architecture"),
        ("get_device_name", lambda *a, **k: "cpu", "Megatron prints it"),
        ("Stream", Stream, "dispatchers and DDP use side streams"),
        ("Event", TimedEvent, "timers and dispatchers use events"),
        ("current_stream", lambda *a, **k: _DEFAULT_STREAM, "other streams wait for it"),
        ("default_stream", lambda *a, **k: _DEFAULT_STREAM, "other streams wait for it"),
        ("set_stream", _nothing(), "there is one stream"),
        ("stream", lambda stream: nullcontext(stream), "a with block runs work on a side stream"),
        ("is_current_stream_capturing", lambda: False, "there are no CUDA graphs"),
    ]
    for name, answer, reason in answers:
        replace(torch.cuda, name, answer, reason)
    for name in ("range_push", "range_pop"):
        replace(torch.cuda.nvtx, name, _nothing(), "Megatron marks profiler ranges")
    replace(torch.cuda.nvtx, "range", lambda *a, **k: nullcontext(), "Megatron marks profiler ranges")


def _answer_memory() -> None:
    device = CpuDevice()

    def memory_stats(*args: Any, **kwargs: Any) -> dict[str, int]:
        used, peak = device.memory_bytes(), device.peak_memory_bytes()
        return {
            "allocated_bytes.all.current": used,
            "allocated_bytes.all.peak": peak,
            "allocation.all.current": 0,
            "reserved_bytes.all.current": used,
        }

    def mem_get_info(*args: Any, **kwargs: Any) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    for name in ("memory_allocated", "memory_reserved"):
        replace(torch.cuda, name, lambda *a, **k: device.memory_bytes(), "memory reports show the resident set")
    for name in ("max_memory_allocated", "max_memory_reserved"):
        replace(torch.cuda, name, lambda *a, **k: device.peak_memory_bytes(), "memory reports show its peak")
    replace(torch.cuda, "memory_stats", memory_stats, "memory reports read it")
    replace(torch.cuda, "mem_get_info", mem_get_info, "memory reports read it")
    for name in ("empty_cache", "reset_peak_memory_stats"):
        replace(torch.cuda, name, _nothing(), "there is no caching allocator")


def _answer_random_states() -> None:
    """Make device and host use one random generator.

    On a GPU, Megatron draws the seeds of data loaders from the host's generator, and dropout from the device's.
    :mod:`megatron.moevement.data.loaders` separates the two purposes on a CPU.
    """

    def get_state(device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def seed(value: int) -> None:
        torch.default_generator.manual_seed(value)

    for owner in (torch.cuda, torch.cuda.random):
        replace(owner, "get_rng_state", get_state, "dropout uses the CPU generator")
        replace(owner, "set_rng_state", set_state, "dropout uses the CPU generator")
        replace(owner, "manual_seed", seed, "dropout uses the CPU generator")
        replace(owner, "manual_seed_all", seed, "dropout uses the CPU generator")


_FACTORIES = (
    "tensor", "as_tensor", "empty", "zeros", "ones", "full", "arange", "linspace", "eye", "rand", "randn", "randint",
    "randperm", "empty_strided", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like",
)  # fmt: skip


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


def _on_cpu(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` on the CPU if ``device`` names a CUDA device."""
    if "device" in kwargs and _is_cuda(kwargs["device"]):
        kwargs["device"] = _CPU
    return function(*args, **kwargs)


def _redirect_tensors() -> None:
    for name in _FACTORIES:
        wrap(torch, name, _on_cpu, "Megatron asks for device='cuda'")
    for name in ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"):
        wrap(torch.Tensor, name, _on_cpu, "Megatron asks for device='cuda'")

    def itself(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor

    replace(torch.Tensor, "cuda", itself, "the device is the CPU")
    replace(torch.nn.Module, "cuda", itself, "the device is the CPU")
    replace(torch.Tensor, "record_stream", _nothing(), "there is one stream")
    replace(torch.Tensor, "pin_memory", itself, "there is no device to copy to")
    wrap(torch.Tensor, "to", _to, "checkpoints are loaded to 'cuda'")
    wrap(torch.Tensor, "type", _type, "optimizers accept torch.cuda.*Tensor only")


def _to(original: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if args and _is_cuda(args[0]):
        args = (_CPU, *args[1:])
    if _is_cuda(kwargs.get("device")):
        kwargs["device"] = _CPU
    return original(tensor, *args, **kwargs)


def _type(original: Callable[..., Any], tensor: torch.Tensor, dtype: Any = None, **kwargs: Any) -> Any:
    if dtype is None:
        return original(tensor).replace("torch.", "torch.cuda.", 1)
    if isinstance(dtype, str):
        dtype = dtype.replace("torch.cuda.", "torch.", 1)
    return original(tensor, dtype, **kwargs)
