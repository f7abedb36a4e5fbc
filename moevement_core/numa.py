"""Binding of a rank to the processors of its GPU's NUMA node, beside which its host memory then lies.

Copies from a GPU to memory of another socket, and threads that send it from there, cross the link between the sockets.
Linux puts a page beside the processor that touches it first, and a thread runs where its maker may; so one call before
snapshots have memory and threads is enough.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from moevement_core import log
from moevement_core.device import Device

SYS = Path("/sys")


@dataclass(frozen=True)
class NumaNode:
    """A NUMA node of this machine."""

    number: int
    processors: frozenset[int]


def node_of(address: str, sys: Path = SYS) -> NumaNode | None:
    """Return the node that a device is attached to; None where the machine does not say.

    Args:
        address: of the device on the PCI bus, as ``0000:1b:00.0``.
        sys: where the kernel's view of devices is mounted.
    """
    try:
        number = int((sys / "bus/pci/devices" / address / "numa_node").read_text())
        processors = _processors(sys / f"devices/system/node/node{number}/cpulist")
    except (OSError, ValueError):  # a container may hide it; -1 has no folder
        return None
    return NumaNode(number, processors) if processors else None


def bind_to_device(device: Device, sys: Path = SYS) -> NumaNode | None:
    """Bind the calling thread, and those that it makes later, to the processors of the device's node, and log it.

    A thread that may not use all processors was bound already, by a user or by Slurm, and stays as it is.

    Returns:
        The node; None if the thread is not bound here.
    """
    if (address := device.pci_address) is None or (node := node_of(address, sys)) is None:
        return None
    place = f"NUMA node {node.number}, that of its GPU {address}"
    allowed = frozenset(os.sched_getaffinity(0))
    if allowed == node.processors:
        return node
    if not allowed >= _online(sys):
        if allowed & node.processors:
            log.info(
                f"bound already, to {len(allowed)} processors, {len(allowed & node.processors)} of them of {place}"
            )
        else:
            log.warning(
                f"bound already, to {len(allowed)} processors, none of them of {place}: copies cross sockets; bind "
                "tasks to the node of their GPU, or leave them unbound"
            )
        return None
    os.sched_setaffinity(0, node.processors)
    log.info(f"bound to the {len(node.processors)} processors of {place}")
    return node


def _online(sys: Path) -> frozenset[int]:
    """Return the processors that the machine has."""
    try:
        return _processors(sys / "devices/system/cpu/online")
    except (OSError, ValueError):
        return frozenset(range(os.cpu_count() or 1))


def _processors(path: Path) -> frozenset[int]:
    """Read a list as the kernel writes it: ``0-3,8``."""
    processors: set[int] = set()
    for word in path.read_text().strip().split(","):
        if word:
            first, _, last = word.partition("-")
            processors.update(range(int(first), int(last or first) + 1))
    return frozenset(processors)
