"""Ranks get devices by identity, whatever numbers processes give them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from moevement_core.device import visible_devices
from moevement_core.launching.slurm import task_environment
from moevement_core.launching.worker import TrainerKind
from moevement_core.rendezvous.devices import assign_devices, place_of, with_free_device
from moevement_core.rendezvous.roster import MemberInfo


def on(node: str, member: int, number: int, devices: int) -> MemberInfo:
    """Return a process that sees all devices of its node."""
    return MemberInfo(member, 1000 + member, node, node, number, tuple(f"{node}-{device}" for device in range(devices)))


def task(node: str, member: int, number: int, device: str) -> MemberInfo:
    """Return a task that sees only the device that it is bound to."""
    return MemberInfo(member, 1000 + member, node, node, number, (device,))


def test_a_promoted_spare_takes_the_device_of_the_rank_that_it_replaces() -> None:
    """Promote a spare on a host with eight GPUs and eight ranks; its local rank 8 is the number of no GPU."""
    before = {rank: rank for rank in range(8) if rank != 3}
    members = {rank: on("a", rank, rank, 8) for rank in before} | {3: on("a", 8, 8, 8)}
    assert assign_devices(members, before)[3] == 3


def test_spares_of_another_node_take_devices_that_are_free_there() -> None:
    before = {0: 0, 1: 1}
    members = {0: on("a", 0, 0, 2), 1: on("a", 1, 1, 2), 2: on("b", 2, 0, 2), 3: on("b", 3, 0, 2)}
    assert assign_devices(members, before) == {0: 0, 1: 1, 2: 0, 3: 1}


def test_a_place_on_a_cpu_that_is_not_trusted_is_left_out() -> None:
    waiting = [on("a", 4, 4, 0), on("a", 5, 5, 0), on("b", 6, 4, 0)]
    assert [info.member for info in with_free_device(waiting, {place_of(waiting[0])})] == [5, 6]


def test_tasks_that_see_one_device_each_have_number_0_all_of_them() -> None:
    members = {rank: task("a", rank, rank, f"GPU-{rank}") for rank in range(4)}
    assert assign_devices(members, {}) == {0: 0, 1: 0, 2: 0, 3: 0}


def test_a_task_whose_only_device_is_taken_is_not_given_a_rank() -> None:
    """Refuse a task that is bound to the device of a live rank, although both call it device 0."""
    beside, free = task("a", 4, 0, "GPU-1"), task("a", 5, 0, "GPU-2")
    assert with_free_device([beside, free], {"GPU-1"}) == [free]


def test_as_many_processes_wait_for_ranks_as_there_are_devices_for_them() -> None:
    waiting = [on("a", member, member, 4) for member in (4, 5, 6)]
    assert [info.member for info in with_free_device(waiting, {"a-0", "a-3"})] == [4, 5]


def test_a_broken_device_is_left_out() -> None:
    members = {0: on("a", 0, 0, 3), 1: on("a", 3, 1, 3)}
    assert assign_devices(members, {0: 0}, broken={"a-1"}) == {0: 0, 1: 2}
    assert with_free_device([members[1]], {"a-0", "a-1", "a-2"}) == []


def test_processes_without_devices_need_none() -> None:
    info = MemberInfo(9, 9, "a", "a", 5)
    assert assign_devices({0: info}, {}) == {0: 5}
    assert with_free_device([info, info], {"GPU-1"}) == [info, info]


def test_devices_are_known_by_their_uuids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=f"7d-{number}"))
    assert visible_devices() == ("GPU-7d-0", "GPU-7d-1")


def test_without_uuids_tasks_on_one_host_know_their_devices_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace())
    names = list[str]()
    for visible in ("3", "5"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        names += visible_devices()
    assert len(set(names)) == 2


@pytest.mark.parametrize(("devices", "local_rank"), [(0, "3"), (1, "0"), (4, "3")])
def test_a_task_of_slurm_that_sees_one_device_has_local_rank_0(
    devices: int, local_rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    trainer = TrainerKind("", lambda _: None, lambda: None, lambda: devices > 0)
    environment = task_environment(3, 4, 3, meets_at_master=False, devices=trainer.count_devices())
    assert (environment["RANK"], environment["LOCAL_RANK"]) == ("3", local_rank)
