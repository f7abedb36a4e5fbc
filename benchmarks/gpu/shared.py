"""Ranks that share one GPU, for checks of several devices on a machine that has one.

NCCL refuses two ranks of a host on one device. Here each rank has a different ``NCCL_HOSTID``. So NCCL believes that
each rank is alone on its host, and connects the ranks by sockets. The consequences of a failure are then real: kernels
that wait for a lost peer, aborts, new communicators, and a spare that builds its state on the device. Rates, NVLink and
peer access are not real, so checks of those need several devices.
"""

from __future__ import annotations

import os

import torch

RANKS = 4
"""Number of ranks on a shared device: two pipeline stages of two ranks."""


def is_shared() -> bool:
    """Return True if the machine has one GPU, so that the ranks of a check of several devices share it."""
    return torch.cuda.is_available() and torch.cuda.device_count() == 1


def environment(name: str) -> dict[str, str]:
    """Return the environment variables of a process that shares its device.

    Args:
        name: name that no other process of the job has.
    """
    return {"NCCL_HOSTID": name, "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "LOCAL_RANK": "0"}


def share_device() -> None:
    """Prepare this process of a launched job to share the device with all other processes. Call it before the script.

    The coordinator assigns a device to one process only. So each process reports a different identity for the device.
    """
    from moevement_core import device
    from moevement_core.util.environment import MEMBER_ENV

    member = os.environ[MEMBER_ENV]
    os.environ.update(environment(f"member-{member}"))
    identity = device._identity
    device._identity = lambda number: f"{identity(number)}/member-{member}"
