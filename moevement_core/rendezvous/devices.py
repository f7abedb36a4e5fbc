"""Which device each rank has, by the identity of devices: each process numbers those that it sees from 0."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from moevement_core.rendezvous.roster import MemberInfo

CHECK_S = 30.0
"""How long a process may check the device that comes with its rank, before it acknowledges the rank."""


def assign_devices(
    members: Mapping[int, MemberInfo], before: Mapping[int, int], broken: Collection[str] = ()
) -> dict[int, int]:
    """Return the local device of each rank: survivors keep theirs, all others take a free one that they see.

    A process that sees no free device, or runs on a CPU, keeps the number that it was started with.

    Args:
        members: the process of each rank.
        before: devices of the ranks that keep their processes, by rank.
        broken: identities of devices that nobody gets.
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
    """Return those of the waiting processes that could all have a device at once, in their order.

    Args:
        waiting: processes without a rank; those on CPUs need no device.
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
    """Return the identity of a device by the number that a process gives it; empty where it has none."""
    return info.devices[number] if number < len(info.devices) else ""


def _free_device(info: MemberInfo, taken: Collection[str]) -> int | None:
    """Return the number of a device that is not taken, preferably the one that the process was started for."""
    free = [number for number, device in enumerate(info.devices) if device not in taken]
    return info.device if info.device in free else min(free, default=None)
