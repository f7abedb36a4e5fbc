"""Health check of this process's device: it tells whether this process, or any process, can still use the device.

A fault of a device or of a kernel destroys the CUDA context of its process. From then on, every call of the process on
the device fails or never returns. The process then gives its rank back to the coordinator, and ends.

Most faults disappear when the process ends. NVML reports the faults that stay: the device needs a reset, or has lost
memory. A device with such a fault is broken. A device also counts as broken if the first check of a process fails. The
coordinator assigns a broken device to no process.

NVML's reports were tested with a stub only. A broken CUDA context was also tested on a GPU (check E6 in docs/gpu.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from moevement_core.util.bounded import within

LIMIT_S = 20.0
"""Longest wait for an answer of a device, in seconds. The first answer includes the creation of a CUDA context."""
NVML_LIMIT_S = 5.0
"""Longest wait for an answer of NVML, in seconds.

The coordinator waits longer than both limits together (:data:`~moevement_core.rendezvous.devices.CHECK_S`).
"""
HARDWARE_ERRORS = {214: "uncorrectable ECC error", 220: "uncorrectable NVLink error"}
"""Error codes of the CUDA runtime (driver_types.h) that mean a broken device."""

_ACCELERATOR_ERROR: Any = getattr(torch, "AcceleratorError", ())  # Older versions of torch have no such class.


@dataclass(frozen=True)
class DeviceFault:
    """Reason why a process cannot go on with its device."""

    reason: str
    """Description of the fault, for log lines."""
    is_broken: bool
    """True if no other process can use the device either."""


@dataclass(frozen=True)
class Errors:
    """Errors of a device's memory since its driver was loaded, as NVML counts them."""

    uncorrected: int = 0
    """Number of uncorrected ECC errors."""
    is_remap_pending: bool = False
    """True if the next reset of the device will replace rows of its memory."""


class DeviceHealth:
    """Health of this process's device, since the process got it.

    Args:
        number: local number of the device.
        identity: identity of the device (its UUID), by which NVML knows it.
        probe: function that uses the device, waits for a result, and raises if the device fails; None:
            :func:`use_device`.
    """

    def __init__(self, number: int, identity: str, probe: Callable[[int], Any] | None = None) -> None:
        self.number, self.identity = number, identity
        self._probe = probe or use_device
        self._errors: Errors | None = None
        """Errors at the first check of the device; None until that check."""

    def check(self) -> DeviceFault | None:
        """Use the device, and ask NVML; return the fault, or None if there is none.

        The method raises nothing, and returns within its time limits even if the device does not answer. If the first
        check of a process fails, the device counts as broken, because this process cannot have caused the fault.
        """
        is_first = self._errors is None
        reason = None
        try:
            within(LIMIT_S, lambda: self._probe(self.number))
        except OSError as error:
            reason = f"the device did not answer: {error.strerror}"
        except Exception as error:
            reason = f"{type(error).__name__}: {_first_line(error)}"
        broken = self._what_nvml_reports()
        if broken is not None:
            return DeviceFault(f"{reason}; {broken}" if reason else broken, is_broken=True)
        return DeviceFault(reason, is_broken=is_first) if reason else None

    def fault_of(self, error: BaseException) -> DeviceFault | None:
        """Return the device fault that caused ``error``; None if ``error`` has another cause."""
        if (fault := fault_of(error)) is None or (broken := self._what_nvml_reports()) is None:
            return fault
        return DeviceFault(f"{fault.reason}; {broken}", is_broken=True)

    def _what_nvml_reports(self) -> str | None:
        """Return the reason why no process can use the device; None if NVML reports none, or is not installed."""
        try:
            reported = within(NVML_LIMIT_S, lambda: _read_nvml(self.identity))
        except OSError:
            return "NVML did not answer"
        except Exception:  # The library, driver or device does not have these counters.
            reported = None
        if reported is None:
            self._errors = self._errors or Errors()
            return None
        action, errors = reported
        before = self._errors = self._errors or errors
        if action is not None:
            return action
        if errors.uncorrected > before.uncorrected:
            return f"{errors.uncorrected - before.uncorrected} new uncorrected ECC errors"
        return "device memory needs a reset" if errors.is_remap_pending > before.is_remap_pending else None


def fault_of(error: BaseException) -> DeviceFault | None:
    """Return the device fault that caused ``error``, found in the chain of exceptions; None if there is none."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, _ACCELERATOR_ERROR):
        seen = seen.__cause__ or seen.__context__
    if seen is None:
        return None
    reason = f"{type(seen).__name__}: {_first_line(seen)}"
    return DeviceFault(reason, is_broken=getattr(seen, "error_code", None) in HARDWARE_ERRORS)


def use_device(number: int) -> None:
    """Have a device add two numbers, and wait for the sum and for all earlier work on the device.

    Args:
        number: local number of the device.

    Raises:
        torch.AcceleratorError: the device or the CUDA context of this process has failed.
    """
    torch.ones(2, device=f"cuda:{number}").sum().item()
    torch.cuda.synchronize(number)


def _read_nvml(identity: str) -> tuple[str | None, Errors] | None:
    """Return the repair that a device needs, if any, and the errors of the device; None without NVML for Python."""
    try:
        nvml = import_module("pynvml")
    except ImportError:
        return None
    nvml.nvmlInit()
    try:
        device = nvml.nvmlDeviceGetHandleByUUID(identity)
        return _needed(nvml, device), _errors(nvml, device)
    finally:
        nvml.nvmlShutdown()


def _needed(nvml: ModuleType, device: Any) -> str | None:
    """Return the repair that a device needs before it can be used, as text; None if it needs none.

    Drivers report recovery actions from version 570 on.
    """
    field = getattr(nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
    if field is not None:
        action = nvml.nvmlDeviceGetFieldValues(device, [field])[0]
        if action.nvmlReturn == nvml.NVML_SUCCESS and action.value.uiVal != nvml.NVML_GPU_RECOVERY_ACTION_NONE:
            return f"the device needs NVML's recovery action {action.value.uiVal}, such as a reset"
    try:
        has_failed = nvml.nvmlDeviceGetRemappedRows(device)[3]
    except nvml.NVMLError:  # Older devices have no spare rows.
        return None
    return "the device could not replace faulty rows of its memory" if has_failed else None


def _errors(nvml: ModuleType, device: Any) -> Errors:
    try:
        uncorrected = nvml.nvmlDeviceGetTotalEccErrors(
            device, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
        return Errors(int(uncorrected), bool(nvml.nvmlDeviceGetRemappedRows(device)[2]))
    except nvml.NVMLError:  # The device's memory has no ECC.
        return Errors()


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]
