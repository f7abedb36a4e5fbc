"""Assignment of devices to ranks. Identities tell devices apart, because each process numbers its devices from 0."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from moevement_core.rendezvous.roster import MemberInfo

CHECK_S = 30.0
"""Seconds that a process may take to check the device of its rank, before it acknowledges the rank."""


def assign_devices(
    members: Mapping[int, MemberInfo], before: Mapping[int, int], broken: Collection[str] = ()
) -> dict[int, int]:
    """Return the local device number of each rank.

    Survivors keep their devices, and every other process takes a free device that it sees. A process that sees no free
    device, or runs on a CPU, keeps the number that it was started with.

    Args:
        members: member of each rank.
        before: local device numbers of the ranks that keep their processes.
        broken: identities of devices that no process may use.
    """
    kept = {rank: number for rank, number in before.items() if rank in members}
    taken = {*broken, *(identity(members[rank], number) for rank, number in kept.items())}
    assigned = dict(kept)
    for rank, info in sorted(members.items()):
        if rank not in kept:
            number = _free_device(info, taken)
            assigned[rank] = info.device if number is None else number
            taken.add(identity(info, assigned[rank]))
    return assigned


def with_free_device(waiting: Sequence[MemberInfo], taken: Collection[str]) -> list[MemberInfo]:
    """Return the waiting processes that could all have a device at the same time, in their order.

    Args:
        waiting: processes without a rank; processes on CPUs need no device.
        taken: identities of devices that are in use or broken.
    """
    taken, able = set(taken), list[MemberInfo]()
    for info in waiting:
        number = _free_device(info, taken)
        if info.devices and number is None:
            continue
        if number is not None:
            taken.add(identity(info, number))
        able.append(info)
    return able


def identity(info: MemberInfo, number: int) -> str:
    """Return the identity of the device that a process knows by ``number``; empty if it has no such device."""
    return info.devices[number] if number < len(info.devices) else ""


def _free_device(info: MemberInfo, taken: Collection[str]) -> int | None:
    """Return the number of a device that is not taken, or None.

    The function prefers the device for which the process was started.
    """
    free = [number for number, device in enumerate(info.devices) if device not in taken]
    return info.device if info.device in free else min(free, default=None)
