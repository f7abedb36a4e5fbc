"""Members and supervisors of a job for the benchmark ``scale``: real clients of the coordinator, without training.

One process has the lease clients of all nodes. Other processes have the members. Each member runs on a thread, with
clients of the job's store of its own, as in a real process.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from moevement_core.comms.token import TOKEN_ENV, own_token
from moevement_core.errors import JobStopped
from moevement_core.rendezvous.lease_client import LeaseClient
from moevement_core.rendezvous.lease_server import ADDRESS
from moevement_core.rendezvous.member import Member
from moevement_core.rendezvous.roster import MemberInfo
from moevement_core.rendezvous.store import GenerationStore, connect, connect_plain

ON_NODE = 8
"""Number of members of a node."""
LOOK = timedelta(seconds=0.5)
"""Interval at which the monitoring thread of a rank asks if its generation is interrupted."""
STEP_S = 0.05
PID = 100_000
"""Process id of member 0, for the coordinator's records only."""
AT_ONCE = 64
"""Number of members that start at a time."""


@dataclass(frozen=True)
class Share:
    """Members that one process of the benchmark stands for."""

    address: tuple[str, int]
    """Host and port of the job's store."""
    token: str
    first: int
    last: int
    """First member, and the member after the last."""
    lease_s: float


class Supervisors:
    """Lease clients of all nodes.

    Args:
        share: all members of the job.
    """

    def __init__(self, share: Share) -> None:
        self._share, self._lock = share, threading.Lock()
        self._dead: set[int] = set()
        host, port = connect(share.address).get(ADDRESS).decode().rsplit(":", 1)
        self._clients = {
            node: LeaseClient(f"node{node}", (host, int(port)), share.lease_s, own_token())
            for node in range(-(-share.last // ON_NODE))
        }
        threading.Thread(target=self._renew, daemon=True).start()

    def state(self) -> int:
        """Return the number of nodes whose lease clients have an answer of the coordinator."""
        return sum(client.is_connected for client in self._clients.values())

    def disconnect(self) -> float:
        """Break the connections of all lease clients; return the monotonic time in seconds."""
        with self._lock:
            for client in self._clients.values():
                client._disconnect()
        return time.monotonic()

    def kill(self, member: int) -> float:
        """Report the death of a member; return the monotonic time in seconds."""
        with self._lock:
            self._dead.add(member)
            self._clients[member // ON_NODE].died(member, PID + member, "was killed by signal 9")
        return time.monotonic()

    def _renew(self) -> None:
        began = time.monotonic()
        while True:
            iteration = int(time.monotonic() - began)
            for node, client in self._clients.items():
                members = range(node * ON_NODE, min((node + 1) * ON_NODE, self._share.last))
                alive = {member: iteration for member in members if member not in self._dead}
                with self._lock:
                    client.step(alive, alive)
            time.sleep(STEP_S)


class Members:
    """Members in one process.

    Args:
        share: members of this process.
    """

    def __init__(self, share: Share) -> None:
        self._share, self._lock = share, threading.Lock()
        self._joined = 0
        self._entered: Counter[int] = Counter()
        """Number of members that have entered each generation."""
        self._entered_at: dict[int, float] = defaultdict(float)
        """Monotonic time in seconds at which the last member entered each generation."""
        self._trains: Counter[int] = Counter()
        """Number of members that have all their clients of the store in each generation."""
        self._dead: set[int] = set()
        self._starting = threading.Semaphore(AT_ONCE)
        threading.stack_size(512 << 10)
        for member in range(share.first, share.last):
            threading.Thread(target=self._run, args=(member,), daemon=True).start()

    def state(self, generation: int) -> tuple[int, int, float, int]:
        """Return numbers of members: joined, entered ``generation``, and train in it; and the time of the last entry.

        The time is the third element of the result.
        """
        with self._lock:
            return self._joined, self._entered[generation], self._entered_at[generation], self._trains[generation]

    def kill(self, member: int) -> None:
        """End a member if it is one of this process, without a report."""
        self._dead.add(member)

    def _run(self, number: int) -> None:
        with suppress(JobStopped):
            info = MemberInfo(number, PID + number, "localhost", f"node{number // ON_NODE}")
            with self._starting:
                member = Member(connect(self._share.address), info)
                member.join()
            with self._lock:
                self._joined += 1
            while True:
                roster, _ = member.wait_for_rank()
                with self._lock:
                    self._entered[roster.generation] += 1
                    self._entered_at[roster.generation] = time.monotonic()
                self._train(number, roster.generation)
                if number in self._dead:
                    return
                member.leave("", roster.generation + 1)

    def _train(self, number: int, generation: int) -> None:
        """Wait until the generation is interrupted or the member is dead, with the store clients of a real rank."""
        import torch.distributed as dist

        groups: Any = connect_plain(self._share.address)
        signals = GenerationStore(connect(self._share.address), generation)
        with self._lock:
            self._trains[generation] += 1
        while number not in self._dead:
            with suppress(dist.DistStoreError):
                signals.wait_for_interrupted(LOOK)
                return
        del groups


def serve(kind: type[Supervisors] | type[Members], share: Share, commands: Connection) -> None:
    """Run members or supervisors in this process, and execute commands until the benchmark closes the connection."""
    os.environ[TOKEN_ENV] = share.token
    served = kind(share)
    with suppress(EOFError):
        while True:
            name, *arguments = commands.recv()
            commands.send(getattr(served, name)(*arguments))
    os._exit(0)
