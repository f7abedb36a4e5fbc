"""Faults of a device that exceptions, probes and NVML report; NVML is a stub."""

from __future__ import annotations

import sys
import threading
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from moevement_core.restart import device_health
from moevement_core.restart.device_health import DeviceHealth, fault_of

CUDA = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported"


class Nvml(ModuleType):
    """Stub of NVML's Python bindings, with the calls that the product makes."""

    NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, NVML_GPU_RECOVERY_ACTION_NONE, NVML_SUCCESS = 274, 0, 0
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0

    class NVMLError(Exception):
        """Error that the library raises."""

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.action, self.uncorrected, self.is_pending, self.has_failed = 0, 3, False, False
        self.has_ecc, self.is_open = True, False
        self.asked: list[str] = []

    def nvmlInit(self) -> None:
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        assert self.is_open
        self.asked.append(uuid)
        return uuid

    def nvmlDeviceGetFieldValues(self, device: str, fields: list[int]) -> list[Any]:
        assert fields == [self.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=self.action))]

    def nvmlDeviceGetTotalEccErrors(self, device: str, kind: int, counter: int) -> int:
        if not self.has_ecc:
            raise self.NVMLError
        assert (kind, counter) == (self.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, self.NVML_VOLATILE_ECC)
        return self.uncorrected

    def nvmlDeviceGetRemappedRows(self, device: str) -> tuple[int, int, bool, bool]:
        if not self.has_ecc:
            raise self.NVMLError
        return 0, 0, self.is_pending, self.has_failed


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    stub = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", stub)
    return stub


@pytest.fixture
def no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)


class Probe:
    """Device that answers until a test sets an error or clears ``answers``."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.answers = threading.Event()
        self.answers.set()

    def __call__(self, number: int) -> None:
        assert number == 5
        self.answers.wait()
        if self.error is not None:
            raise self.error


@pytest.fixture
def probe() -> Any:
    device = Probe()
    yield device
    device.answers.set()


def health(probe: Probe) -> DeviceHealth:
    return DeviceHealth(5, "GPU-5", probe)


def test_a_device_that_works_has_no_fault_whatever_errors_it_had_before(probe: Probe, nvml: Nvml) -> None:
    checker = health(probe)
    nvml.is_pending = True
    assert (checker.check(), checker.check()) == (None, None)
    assert (set(nvml.asked), nvml.is_open) == ({"GPU-5"}, False)


def test_a_device_whose_memory_has_no_error_correction_may_be_used(probe: Probe, nvml: Nvml) -> None:
    nvml.has_ecc = False
    assert health(probe).check() is None


@pytest.mark.usefixtures("no_nvml")
def test_without_nvml_a_device_is_used_all_the_same(probe: Probe) -> None:
    checker = health(probe)
    assert checker.check() is None
    probe.error = torch.AcceleratorError(CUDA)
    fault = checker.check()
    assert fault is not None
    assert not fault.is_broken, "the context is broken; another process may have the device"
    assert "\n" not in fault.reason


@pytest.mark.parametrize(
    ("figure", "value"), [("action", 1), ("uncorrected", 4), ("is_pending", True), ("has_failed", True)]
)
def test_what_nvml_reports_breaks_the_device(figure: str, value: int, probe: Probe, nvml: Nvml) -> None:
    checker = health(probe)
    assert checker.check() is None
    setattr(nvml, figure, value)
    for fault in (checker.check(), checker.fault_of(torch.AcceleratorError(CUDA))):
        assert fault is not None
        assert fault.is_broken


@pytest.mark.parametrize("figure", ["action", "has_failed"])
def test_a_device_that_is_to_be_reset_is_given_to_nobody(figure: str, probe: Probe, nvml: Nvml) -> None:
    setattr(nvml, figure, True)
    fault = health(probe).check()
    assert fault is not None
    assert fault.is_broken


@pytest.mark.usefixtures("nvml")
def test_a_device_that_fails_a_process_which_did_nothing_yet_is_broken(probe: Probe) -> None:
    probe.error = torch.AcceleratorError(CUDA)
    fault = health(probe).check()
    assert fault is not None
    assert fault.is_broken


@pytest.mark.usefixtures("nvml")
@pytest.mark.parametrize("is_first", [True, False])
def test_a_device_that_does_not_answer_holds_up_nobody(
    probe: Probe, is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_health, "LIMIT_S", 0.3)
    checker = health(probe)
    if not is_first:
        checker.check()
    probe.answers.clear()
    began = time.monotonic()
    fault = checker.check()
    assert time.monotonic() - began < 15
    assert fault is not None
    assert fault.is_broken == is_first, "what this process left undone ends with it"


def test_an_nvml_that_does_not_answer_holds_up_nobody(
    probe: Probe, nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_health, "NVML_LIMIT_S", 0.3)
    checker, stuck = health(probe), threading.Event()
    assert checker.check() is None
    monkeypatch.setattr(nvml, "nvmlInit", stuck.wait)
    fault = checker.check()
    stuck.set()
    assert fault is not None
    assert fault.is_broken


@pytest.mark.usefixtures("nvml")
def test_other_errors_are_none_of_the_device(probe: Probe) -> None:
    checker = health(probe)
    for error in (RuntimeError("shapes"), torch.OutOfMemoryError("CUDA out of memory")):
        assert (checker.fault_of(error), fault_of(error)) == (None, None)


def test_the_error_of_a_thread_is_found_behind_the_one_that_it_led_to() -> None:
    try:
        try:
            raise torch.AcceleratorError(CUDA)
        except RuntimeError as error:
            raise ValueError("the capture thread failed") from error
    except ValueError as error:
        fault = fault_of(error)
    assert fault is not None
    assert not fault.is_broken


@pytest.mark.parametrize(("code", "is_broken"), [(214, True), (220, True), (700, False)])
def test_some_codes_say_that_the_device_is_broken(code: int, is_broken: bool) -> None:
    error = torch.AcceleratorError("CUDA error")
    error.error_code = code  # type: ignore[attr-defined]
    fault = fault_of(error)
    assert fault is not None
    assert fault.is_broken == is_broken
