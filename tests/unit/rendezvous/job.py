"""Coordinator and members in one process, without processes of ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from moevement_core.rendezvous.coordinator import Coordinator, State
from moevement_core.rendezvous.member import Member
from moevement_core.rendezvous.process_list import process_entries
from moevement_core.rendezvous.roster import ACKNOWLEDGED, INTERRUPTED, MemberInfo
from moevement_core.rendezvous.values import Values
from tests.values import LocalValues


class Job:
    """Coordinator and members without processes; time passes only in :meth:`passes`."""

    def __init__(
        self, values: Values, ranks: int, members: int, spare_timeout_s: float = 60.0, lease_s: float = 1e9
    ) -> None:
        self.values, self.reported = values, list[str]()
        self.client, self.groups = LocalValues(values), dist.HashStore()
        self.now = 0.0
        self.coordinator = Coordinator(
            values, ranks, spare_timeout_s, self.reported.append, lease_s=lease_s, clock=lambda: self.now,
            groups=self.groups,
        )  # fmt: skip
        self.members: dict[int, Member] = {}
        self.silent: set[int] = set()
        for number in range(members):
            self.join(number)

    @property
    def waiting(self) -> list[int]:
        return self.coordinator.spares.waiting(self.coordinator.roster)

    @property
    def process_entries(self) -> list[dict[str, Any]]:
        coordinator = self.coordinator
        return process_entries(coordinator.roster, coordinator.membership, coordinator.respawns)

    @property
    def interrupted(self) -> tuple[int, int] | None:
        """Newest interruption: the generation and the failed rank."""
        if (text := self.values.read(INTERRUPTED)) is None:
            return None
        generation, record = text.split(" ")
        return int(generation), int(record.partition(":")[0])

    def join(self, number: int, node: str | None = None, devices: tuple[str, ...] = ()) -> None:
        node = f"node{number // 2}" if node is None else node
        self.members[number] = Member(self.client, MemberInfo(number, 1000 + number, "host", node, 0, devices))
        self.members[number].join()
        self.settle()

    def settle(self, *, but: tuple[int, ...] = ()) -> None:
        """Let the members of a proposed roster acknowledge it, except those in ``but`` and those that are silent."""
        for _ in range(4):
            self.coordinator.step()
            if self.coordinator.state is State.PROPOSED:
                roster = self.coordinator.roster
                for number in set(roster.ranks.values()) - set(but) - self.silent:
                    self.members[number]._generation = roster.generation
                    self.members[number]._report(ACKNOWLEDGED, "")

    def passes(self, seconds: float, alive: Iterable[int] = (), committed: int | None = None) -> None:
        """Let time pass, in which the members in ``alive`` renew their leases and the coordinator steps often."""
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now = min(end, self.now + 0.2)
            self.coordinator.renew(dict.fromkeys(alive, committed))
            self.coordinator.step()

    def rank_of(self, number: int) -> int:
        rank = self.coordinator.roster.rank_of(number)
        assert rank is not None
        return rank

    def leave(self, *numbers: int, reason: str = "", committed: int = 0, suspects: tuple[int, ...] = ()) -> None:
        for number in numbers:
            self.members[number].leave(reason, committed, suspects=suspects)
        self.settle()
