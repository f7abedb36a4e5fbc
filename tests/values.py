"""Stand-ins for tests of a job's control: values whose coordinator is in the same process, and a holder of leases."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace

from moevement_core.rendezvous.drains import Drains
from moevement_core.rendezvous.values import Values


class LocalValues:
    """Client of values in the same process; a test may use it on any thread."""

    def __init__(self, values: Values) -> None:
        self.values = values
        self.set, self.claim, self.read = values.set, values.claim, values.read
        self.raise_to = values.raise_to

    def report(self, key: str, value: str) -> None:
        """Report a value under ``TOPIC/MEMBER``."""
        topic, _, member = key.rpartition("/")
        self.values.report(topic, int(member), value)

    def watch(self, key: str) -> str | None:
        """Return the value of a key."""
        return self.values.read(key)

    def wait_until(self, holds: Callable[[], bool], timeout_s: float = float("inf")) -> bool:
        """Look every few milliseconds until ``holds()``; return False if the timeout comes first."""
        deadline = time.monotonic() + timeout_s
        while not holds():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True

    def close(self) -> None:
        """Do nothing, because there is no connection."""


class Holder:
    """Recorder of the calls on which a coordinator would act."""

    def __init__(self) -> None:
        self.lost: list[int] = []
        self.membership = SimpleNamespace(lease_s=10.0, disconnected=lambda members: self.lost.extend(sorted(members)))
        self.given_up: set[int] = set()
        self.drains = Drains(print)
        self.unhealthy: dict[str, str] = {}
        self.leaving: set[str] = set()
        self.alive: dict[int, int | None] = {}
        self.dead: list[tuple[int, int, str]] = []

    def renew(self, members: Mapping[int, int | None]) -> None:
        self.alive.update(members)

    def died(self, member: int, pid: int, how: str) -> None:
        self.dead.append((member, pid, how))

    def node_health(self, supervisor: str, members: Iterable[int], reason: str, *, is_leaving: bool = False) -> None:
        self.unhealthy[supervisor] = reason
        if is_leaving:
            self.leaving.add(supervisor)

    def keep(self) -> None:
        pass
