"""Assignment of devices to ranks.

Each process numbers its devices from 0, so a number alone does not say which device is meant. An *identity* (the UUID
of a GPU) names a device for all processes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from moevement_core.rendezvous.roster import MemberInfo

CHECK_S = 30.0
"""Seconds that a process may take to check the device of its rank, before it acknowledges the rank."""


def assign_devices(
    members: Mapping[int, MemberInfo], before: Mapping[int, int], broken: Collection[str] = ()
) -> dict[int, int]:
    """Return the device number of each rank, as the rank's process counts its devices.

    Survivors keep their devices, and every other process takes a free device that it sees. A process that sees no free
    device, or runs on a CPU, keeps the number that it was started with.

    Args:
        members: member of each rank.
        before: device numbers of the ranks that keep their processes, as each process counts its devices.
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
    """Return the waiting processes that can take ranks at the same time: each gets a separate free device.

    The function goes through the processes in order, and omits a process that sees no device that is still free, and
    one on a CPU whose place is not trusted any more (:func:`place_of`).

    Args:
        waiting: processes without a rank; processes on CPUs need no device.
        taken: identities of devices that are in use or broken.
    """
    taken, able = set(taken), list[MemberInfo]()
    for info in waiting:
        number = _free_device(info, taken)
        if place_of(info) in taken if not info.devices else number is None:
            continue
        if number is not None:
            taken.add(identity(info, number))
        able.append(info)
    return able


def place_of(info: MemberInfo) -> str:
    """Return a name for the place of a process on a CPU, which has no identity of a device."""
    return f"{info.node}/local-rank-{info.device}"


def identity(info: MemberInfo, number: int) -> str:
    """Return the identity of a process's device with this number; an empty string if there is no such device."""
    return info.devices[number] if number < len(info.devices) else ""


def _free_device(info: MemberInfo, taken: Collection[str]) -> int | None:
    """Return the number of a device of this process whose identity is not in ``taken``; None if there is none.

    The function prefers the device for which the process was started.
    """
    free = [number for number, device in enumerate(info.devices) if device not in taken]
    return info.device if info.device in free else min(free, default=None)
