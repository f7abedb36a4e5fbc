"""Binding of a rank to the processors of its GPU's NUMA node, so that Linux allocates the rank's host memory there.

If a GPU copies to the memory of another socket, the bytes cross the link between the sockets. They cross it again when
a thread on the first socket sends them. Linux places a page next to the processor that touches it first, and a thread
inherits the processors of its creator. So one call suffices, if the rank makes it before it allocates snapshots and
starts threads.
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
    """NUMA node of this machine, by number and processors."""

    number: int
    processors: frozenset[int]


def node_of(address: str, sys: Path = SYS) -> NumaNode | None:
    """Return the NUMA node of a device, or None if the machine does not report it.

    Args:
        address: address of the device on the PCI bus, as ``0000:1b:00.0``.
        sys: mount point of sysfs.
    """
    try:
        number = int((sys / "bus/pci/devices" / address / "numa_node").read_text())
        processors = _processors(sys / f"devices/system/node/node{number}/cpulist")
    except (OSError, ValueError):  # A container may hide the files. For an unknown node, the kernel gives -1.
        return None
    return NumaNode(number, processors) if processors else None


def bind_to_device(device: Device, sys: Path = SYS) -> NumaNode | None:
    """Bind the calling thread to the processors of the device's NUMA node, and log the result.

    Threads that the calling thread starts later inherit the binding. If the calling thread may use only some of the
    processors, a user or Slurm has bound it before, and the function leaves that binding as it is.

    Returns:
        The NUMA node; None if the thread is not bound to exactly this node.
    """
    if (address := device.pci_address) is None or (node := node_of(address, sys)) is None:
        return None
    place = f"NUMA node {node.number} of this rank's GPU {address}"
    allowed = frozenset(os.sched_getaffinity(0))
    if allowed == node.processors:
        return node
    if not allowed >= _online(sys):
        if allowed & node.processors:
            log.info(
                f"this process is bound to {len(allowed)} processors; "
                f"{len(allowed & node.processors)} of these are on {place}"
            )
        else:
            log.warning(
                f"this process is bound to {len(allowed)} processors, none of them on {place}; copies cross sockets; "
                "bind each task to the NUMA node of its GPU, or do not bind tasks"
            )
        return None
    os.sched_setaffinity(0, node.processors)
    log.info(f"this process is now bound to the {len(node.processors)} processors of {place}")
    return node


def _online(sys: Path) -> frozenset[int]:
    """Return the processors of the machine that are online."""
    try:
        return _processors(sys / "devices/system/cpu/online")
    except (OSError, ValueError):
        return frozenset(range(os.cpu_count() or 1))


def _processors(path: Path) -> frozenset[int]:
    """Return the processors that a file of the kernel lists in the form ``0-3,8``."""
    processors: set[int] = set()
    for word in path.read_text().strip().split(","):
        if word:
            first, _, last = word.partition("-")
            processors.update(range(int(first), int(last or first) + 1))
    return frozenset(processors)
