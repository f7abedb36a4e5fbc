"""Health of this process's device: whether the process can continue with it, and whether another process could.

A fault of a device, or of a kernel, ends the CUDA context of its process for good: whatever the process asks of the
device fails from then on, or never returns. Such a process gives its rank back. Most faults end with the process. NVML
reports those that do not (a reset is due, memory was lost), and a device that fails a process which has only just come
to it is broken, too: then nobody gets it. Tested with a stubbed NVML, and not run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from moevement_core.persistence.bounded import within

LIMIT_S = 20.0
"""Seconds that a device has to answer; the first time it also makes a context for the process."""
NVML_LIMIT_S = 5.0
"""Seconds that NVML has to answer. Both together are less than the coordinator's limit
(:data:`~moevement_core.rendezvous.devices.CHECK_S`).
"""
HARDWARE_ERRORS = {214: "uncorrectable ECC error", 220: "uncorrectable NVLink error"}
"""Codes of the CUDA runtime (driver_types.h) that say that a device is broken."""

_ACCELERATOR_ERROR: Any = getattr(torch, "AcceleratorError", ())  # older versions have no class for it


@dataclass(frozen=True)
class DeviceFault:
    """Reason why a process cannot go on with its device."""

    reason: str
    """Reason in words."""
    is_broken: bool
    """True if no other process can use the device, either."""


@dataclass(frozen=True)
class Errors:
    """Errors of a device's memory since its driver was loaded, as NVML counts them."""

    uncorrected: int = 0
    is_remap_pending: bool = False
    """True if rows of its memory are to be replaced when the device is reset."""


class DeviceHealth:
    """Health of the device of this process, since the process got it.

    Args:
        number: of the device, as this process counts devices.
        identity: of the device, by which NVML knows it.
        probe: has the device do something and waits for it; raises if it cannot. None: :func:`use_device`.
    """

    def __init__(self, number: int, identity: str, probe: Callable[[int], Any] | None = None) -> None:
        self.number, self.identity = number, identity
        self._probe = probe or use_device
        self._errors: Errors | None = None
        """Errors that were counted when the process got the device; None if it was not checked yet."""

    def check(self) -> DeviceFault | None:
        """Use the device, and ask NVML; return what is wrong. Returns in time also where the device does not answer.

        Raises nothing. A process whose first check fails has done nothing wrong: the device is broken.
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
        """Return the fault of the device that an exception came from; None if it came from none."""
        if (fault := fault_of(error)) is None or (broken := self._what_nvml_reports()) is None:
            return fault
        return DeviceFault(f"{fault.reason}; {broken}", is_broken=True)

    def _what_nvml_reports(self) -> str | None:
        """Return why nobody can use the device; None if NVML reports nothing, or is not there."""
        try:
            found = within(NVML_LIMIT_S, lambda: _read_nvml(self.identity))
        except OSError:
            return "NVML did not answer"
        except Exception:  # a library, driver or device without these figures
            found = None
        if found is None:
            self._errors = self._errors or Errors()
            return None
        action, errors = found
        before = self._errors = self._errors or errors
        if action is not None:
            return action
        if errors.uncorrected > before.uncorrected:
            return f"{errors.uncorrected - before.uncorrected} uncorrected ECC errors"
        return "rows of its memory wait for a reset" if errors.is_remap_pending > before.is_remap_pending else None


def fault_of(error: BaseException) -> DeviceFault | None:
    """Return the fault of a device that an exception, or what led to it, came from; None if it came from none."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, _ACCELERATOR_ERROR):
        seen = seen.__cause__ or seen.__context__
    if seen is None:
        return None
    reason = f"{type(seen).__name__}: {_first_line(seen)}"
    return DeviceFault(reason, is_broken=getattr(seen, "error_code", None) in HARDWARE_ERRORS)


def use_device(number: int) -> None:
    """Have a device add two numbers, and wait for that and for all that was asked of it before.

    Raises:
        torch.AcceleratorError: the device, or the context of this process, can do nothing any more.
    """
    torch.ones(2, device=f"cuda:{number}").sum().item()
    torch.cuda.synchronize(number)


def _read_nvml(identity: str) -> tuple[str | None, Errors] | None:
    """Return what NVML asks for before the device can be used, and its errors; None without NVML for Python."""
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
    """Return what has to be done before the device can be used (drivers from 570 on report that)."""
    field = getattr(nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
    if field is not None:
        found = nvml.nvmlDeviceGetFieldValues(device, [field])[0]
        if found.nvmlReturn == nvml.NVML_SUCCESS and found.value.uiVal != nvml.NVML_GPU_RECOVERY_ACTION_NONE:
            return f"NVML asks for a reset, or more (recovery action {found.value.uiVal})"
    try:
        has_failed = nvml.nvmlDeviceGetRemappedRows(device)[3]
    except nvml.NVMLError:  # older devices have no rows to spare
        return None
    return "rows of its memory could not be replaced" if has_failed else None


def _errors(nvml: ModuleType, device: Any) -> Errors:
    try:
        uncorrected = nvml.nvmlDeviceGetTotalEccErrors(
            device, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
        return Errors(int(uncorrected), bool(nvml.nvmlDeviceGetRemappedRows(device)[2]))
    except nvml.NVMLError:  # memory without ECC
        return Errors()


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]
