"""A rank is bound to the processors of its GPU's NUMA node, on an invented machine."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, override

import pytest
import torch

from moevement_core import log
from moevement_core.device import CpuDevice, CudaDevice, current_device
from moevement_core.saving.identity import JobNames
from moevement_core.session import build
from moevement_core.trainer.config import SessionConfig
from moevement_core.util.numa import NumaNode, bind_to_device, node_of

FIRST, SECOND, NOWHERE = "0000:1b:00.0", "0001:c3:00.0", "0000:ff:00.0"


class Gpu(CpuDevice):
    """Device at a PCI address that the test sets."""

    def __init__(self, address: str | None) -> None:
        super().__init__()
        self.address = address

    @property
    @override
    def pci_address(self) -> str | None:
        return self.address


@pytest.fixture
def sys(tmp_path: Path) -> Path:
    """Describe two sockets of eight cores with two threads each, a GPU at each, and a GPU without a known node."""
    for path, text in {
        "bus/pci/devices/0000:1b:00.0/numa_node": "0\n",
        "bus/pci/devices/0001:c3:00.0/numa_node": "1\n",
        "bus/pci/devices/0000:ff:00.0/numa_node": "-1\n",
        "devices/system/node/node0/cpulist": "0-7,16-23\n",
        "devices/system/node/node1/cpulist": "8-15,24-31\n",
        "devices/system/cpu/online": "0-31\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


@pytest.fixture
def affinity(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """Return the history of the processors that the calling thread may use, the newest last."""
    history = [set(range(32))]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(history[-1]))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, processors: history.append(set(processors)))
    return history


@pytest.fixture
def levels(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that receives the level of each logged message."""
    logged: list[int] = []
    monkeypatch.setattr(log, "info", lambda text: logged.append(logging.INFO))
    monkeypatch.setattr(log, "warning", lambda text: logged.append(logging.WARNING))
    return logged


def test_a_rank_is_bound_to_the_node_of_its_gpu(sys: Path, affinity: list[set[int]], levels: list[int]) -> None:
    node = NumaNode(1, frozenset({*range(8, 16), *range(24, 32)}))
    assert bind_to_device(Gpu(SECOND), sys) == node
    assert affinity[1:] == [set(node.processors)]
    assert levels == [logging.INFO]
    assert bind_to_device(Gpu(SECOND), sys) == node, "once more, in the next session of the process"
    assert len(affinity) == 2
    assert levels == [logging.INFO]


@pytest.mark.parametrize(
    ("allowed", "level"),
    [({0, 1}, logging.INFO), ({7, 8}, logging.INFO), ({8, 9}, logging.WARNING), (set(range(31)), logging.INFO)],
)
def test_one_that_is_bound_already_stays_as_it_is(
    sys: Path, affinity: list[set[int]], levels: list[int], allowed: set[int], level: int
) -> None:
    affinity.append(allowed)
    assert bind_to_device(Gpu(FIRST), sys) is None
    assert affinity[-1] == allowed
    assert levels == [level]


@pytest.mark.parametrize("address", [NOWHERE, "0000:00:00.0", None])
def test_where_nothing_is_known_nothing_is_bound(
    sys: Path, affinity: list[set[int]], levels: list[int], address: str | None
) -> None:
    assert bind_to_device(Gpu(address), sys) is None
    assert len(affinity) == 1
    assert levels == []


def test_threads_that_are_made_later_are_bound_too(sys: Path, levels: list[int]) -> None:
    """Bind in a thread, so that other threads of this process keep their processors."""
    allowed = os.sched_getaffinity(0)
    wanted = {min(allowed)}
    (sys / "devices/system/node/node0/cpulist").write_text(f"{min(wanted)}\n")
    (sys / "devices/system/cpu/online").write_text(",".join(map(str, sorted(allowed))))
    observed: list[set[int]] = []

    def note() -> None:
        observed.append(os.sched_getaffinity(0))

    def rank() -> None:
        bind_to_device(Gpu(FIRST), sys)
        note()
        run(note)

    def run(body: Callable[[], None]) -> None:
        thread = threading.Thread(target=body)
        thread.start()
        thread.join()

    run(rank)
    assert observed == [wanted, wanted]
    assert os.sched_getaffinity(0) == allowed


def test_the_address_of_a_gpu_is_written_as_the_kernel_does(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(pci_domain_id=1, pci_bus_id=0xC3, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    device = CudaDevice.__new__(CudaDevice)
    device.torch_device = torch.device("cuda", 0)
    assert device.pci_address == SECOND
    if current_device().kind == "cpu":
        assert current_device().pci_address is None


def test_lists_of_processors_are_read_as_the_kernel_writes_them(sys: Path) -> None:
    (sys / "devices/system/node/node0/cpulist").write_text("0,2-4,9\n")
    assert node_of(FIRST, sys) == NumaNode(0, frozenset({0, 2, 3, 4, 9}))
    (sys / "devices/system/node/node0/cpulist").write_text("\n")
    assert node_of(FIRST, sys) is None, "a node of memory alone"


def test_a_session_binds_before_it_has_threads_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reached(Exception):
        pass

    def begun(*_: object, **__: object) -> None:
        raise Reached

    bound: list[str] = []
    monkeypatch.setattr(build, "bind_to_device", lambda device: bound.append(device.kind))
    monkeypatch.setattr(build, "connect", begun)
    binding: Any = None
    with pytest.raises(Reached):
        build.build_session(binding, SessionConfig(), JobNames(""))
    assert bound == [current_device().kind]
