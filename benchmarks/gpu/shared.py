"""Ranks that share one GPU, for the checks of several devices on a machine that has one.

NCCL refuses two ranks on one device of a host. With an ``NCCL_HOSTID`` of its own, NCCL takes each rank for the only
one of its host, and connects it to the others by sockets. Everything that a failure sets off is then real: kernels that
wait for a lost peer, aborts, new communicators, and a spare that builds its state on the device. Rates, NVLink and peer
access are not, so checks of those need several devices.
"""

from __future__ import annotations

import os

import torch

RANKS = 4
"""Number of ranks on a shared device: two pipeline stages of two ranks."""


def is_shared() -> bool:
    """Return True if the ranks of a check of several devices share the only one."""
    return torch.cuda.is_available() and torch.cuda.device_count() == 1


def environment(name: str) -> dict[str, str]:
    """Return the environment of a process that shares its device.

    Args:
        name: name that no other process of the job has.
    """
    return {"NCCL_HOSTID": name, "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "LOCAL_RANK": "0"}


def share_device() -> None:
    """Prepare a process of a launched job, before its script begins, to share the device with all others.

    The coordinator gives a device to one process only. So each process states an identity of its own for the device.
    """
    from moevement_core import device
    from moevement_core.util.environment import MEMBER_ENV

    member = os.environ[MEMBER_ENV]
    os.environ.update(environment(f"member-{member}"))
    identity = device._identity
    device._identity = lambda number: f"{identity(number)}/member-{member}"
