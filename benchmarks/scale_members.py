"""Members and supervisors of a job for the benchmark ``scale``: real clients of the coordinator, without training.

One process has the lease clients of some nodes, and the members on them. Each member is a greenlet that runs the code of
a real member. It reaches its node's lease client by a call, where a real process uses a Unix socket and the relay of its
supervisor: on a cluster, each node has processors of its own for that.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import greenlet

from moevement_core.comms.token import TOKEN_ENV, own_token
from moevement_core.errors import JobStopped
from moevement_core.rendezvous.interruption import GenerationStore
from moevement_core.rendezvous.lease_client import LeaseClient
from moevement_core.rendezvous.member import Member
from moevement_core.rendezvous.roster import INTERRUPTED, STORE, MemberInfo
from moevement_core.rendezvous.store import connect_store
from moevement_core.rendezvous.values import AskedValues, RequestKind

ON_NODE = 8
"""Number of members of a node."""
STEP_S = 0.005
"""Longest pause between two rounds, in which a process steps each of its lease clients."""
AT_ONCE = 64
"""Number of clients of the store that a process makes at a time."""
PID = 100_000
"""Process id of member 0, for the coordinator's records only."""


@dataclass(frozen=True)
class Share:
    """Members that one process of the benchmark stands for."""

    address: tuple[str, int]
    """Host and port of the coordinator."""
    token: str
    first: int
    last: int
    """First member, and the member after the last."""
    lease_s: float


class _Node:
    """Lease client of a node, with the values that its members watch.

    Args:
        number: number of the node.
        share: members of this process.
        resume: called with greenlets that can go on.
    """

    def __init__(self, number: int, share: Share, resume: Callable[[Iterable[Any]], None]) -> None:
        self.client = LeaseClient(f"node{number}", share.address, share.lease_s, own_token())
        self.client.on_change = self._changed
        self.members = range(number * ON_NODE, min((number + 1) * ON_NODE, share.last))
        self.dead: set[int] = set()
        self.known: dict[str, str | None] = {}
        self.changes = 0
        """Number of values that have arrived."""
        self.waiting: set[Any] = set()
        """Greenlets that wait for a change."""
        self._resume = resume

    def step(self, iteration: int) -> None:
        """Renew the leases of the living members, and take in answers."""
        alive = {member: iteration for member in self.members if member not in self.dead}
        self.client.step(alive, alive)

    def wake(self) -> None:
        """Let all members look at the values again."""
        waiting, self.waiting = self.waiting, set()
        self._resume(waiting)

    def _changed(self, key: str, value: str) -> None:
        self.first(key, value)

    def first(self, key: str, value: str | None) -> None:
        """Take the first value of a watched key."""
        self.known[key] = value
        self.changes += 1
        self.wake()


class _Values(AskedValues):
    """Client of the job's values for one member (:class:`~moevement_core.rendezvous.values.JobValues`)."""

    def __init__(self, node: _Node, member: int, hub: Any) -> None:
        self._node, self._member, self._hub = node, member, hub
        self._asked: set[str] = set()

    def watch(self, key: str) -> str | None:
        known = self._node.known
        if key not in known and key not in self._asked:
            self._asked.add(key)
            if key not in self._node.client._watched:
                self._node.client.ask(RequestKind.WATCH, key, None, partial(self._node.first, key))
        while key not in known:
            self._wait()
        return known[key]

    def wait_until(self, holds: Callable[[], bool], timeout_s: float = float("inf")) -> bool:
        while True:
            before = self._node.changes
            if holds():
                return True
            if self._node.changes == before:  # Values may have changed while ``holds`` asked for one.
                self._wait()

    def close(self) -> None:
        pass

    def _ask(self, kind: RequestKind, key: str, value: str | None) -> str | None:
        answers: list[str | None] = []
        own = greenlet.getcurrent()

        def then(answer: str | None) -> None:
            answers.append(answer)
            self._node._resume([own])

        self._node.client.ask(kind, key, value, then)
        while not answers:
            self._pause()
        return answers[0]

    def _wait(self) -> None:
        self._node.waiting.add(greenlet.getcurrent())
        self._pause()

    def _pause(self) -> None:
        self._hub.switch()
        if self._member in self._node.dead:
            raise JobStopped("the benchmark has ended this member")


class Members:
    """Members in one process.

    Args:
        share: members of this process, of whole nodes.
    """

    def __init__(self, share: Share) -> None:
        self._share, self._lock = share, threading.Lock()
        self._joined = 0
        self._entered: Counter[int] = Counter()
        """Number of members that have entered each generation."""
        self._entered_at: dict[int, float] = defaultdict(float)
        """Monotonic time in seconds at which the last member entered each generation."""
        self._ready: dict[Any, None] = {}
        """Greenlets that can go on."""
        self._store: tuple[str, int] | None = None
        self._groups: list[Any] = []
        self._nodes = {
            number: _Node(number, share, lambda members: self._ready.update(dict.fromkeys(members)))
            for number in range(share.first // ON_NODE, -(-share.last // ON_NODE))
        }
        self._begins = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def begin(self) -> None:
        """Let the members join."""
        self._begins.set()

    def connected(self) -> int:
        """Return the number of nodes whose lease clients have an answer of the coordinator."""
        return sum(node.client.is_connected for node in self._nodes.values())

    def entered(self, generation: int) -> tuple[int, float]:
        """Return how many members have entered a generation, and the monotonic time of the last entry in seconds."""
        with self._lock:
            return self._entered[generation], self._entered_at[generation]

    def connect_to_store(self) -> None:
        """Make a client of the store of process groups for each member, as ranks do in each generation."""
        assert self._store is not None
        own_token()  # The threads below find it in memory.
        stores = [self._store] * (self._share.last - self._share.first)
        with ThreadPoolExecutor(AT_ONCE) as threads:  # torch looks up the name of the address, which may take long.
            self._groups = list(threads.map(connect_store, stores))

    def asked_for_standby(self) -> tuple[int, tuple[str, int], str] | None:
        """Return the node that is to start a standby, with the addresses of the coordinator and of its own host."""
        for number, node in self._nodes.items():
            if node.client.start_standby and node.client.own_host and not node.client.has_standby:
                return number, node.client.address, node.client.own_host
        return None

    def has_standby(self, number: int) -> None:
        """Note that a standby runs on a node."""
        if number in self._nodes:
            self._nodes[number].client.has_standby = True

    def prepared(self) -> int:
        """Return the number of nodes that know the standby."""
        return sum(node.client.other is not None for node in self._nodes.values())

    def obeying(self, term: int) -> int:
        """Return the number of nodes whose lease clients have an answer of the coordinator of a term."""
        return sum(node.client.term.number == term and node.client.is_connected for node in self._nodes.values())

    def question(self) -> tuple[float, float]:
        """Ask for each member if its generation is interrupted; return the monotonic times of first and last, in s."""
        answered: list[float] = []
        with self._lock:
            began = time.monotonic()
            for node in self._nodes.values():
                for _ in node.members:
                    node.client.ask(
                        RequestKind.READ, INTERRUPTED, None, lambda value: answered.append(time.monotonic())
                    )
                node.client.flush()
        while len(answered) < self._share.last - self._share.first:
            time.sleep(0.001)
        return began, answered[-1]

    def disconnect(self) -> float:
        """Break the connections of all lease clients; return the monotonic time in seconds."""
        with self._lock:
            for node in self._nodes.values():
                node.client._disconnect()
        return time.monotonic()

    def kill(self, member: int) -> float:
        """End a member if it is one of this process, and report its death; return the monotonic time in seconds."""
        node = self._nodes.get(member // ON_NODE)
        if node is not None:
            with self._lock:
                node.dead.add(member)
                node.client.died(member, PID + member, "was killed by signal 9")
                node.wake()
        return time.monotonic()

    def _serve(self) -> None:
        began, has_begun = time.monotonic(), False
        hub = greenlet.getcurrent()
        while True:
            with self._lock:
                for node in self._nodes.values():
                    node.step(int(time.monotonic() - began))
                if self._begins.is_set() and not has_begun:
                    has_begun = True
                    for member in range(self._share.first, self._share.last):
                        self._ready[greenlet.greenlet(partial(self._run, member, hub), hub)] = None
                was_idle = not self._ready
                while self._ready:
                    ready, self._ready = self._ready, {}
                    for task in ready:
                        task.switch()
                for node in self._nodes.values():
                    node.client.flush()
            time.sleep(STEP_S if was_idle else 0.0)

    def _run(self, number: int, hub: Any) -> None:
        node = self._nodes[number // ON_NODE]
        values = _Values(node, number, hub)
        with suppress(JobStopped):
            member = Member(values, MemberInfo(number, PID + number, "localhost", f"node{number // ON_NODE}"))
            member.join()
            if self._store is None:
                host, port = (values.read(STORE) or "").rsplit(":", 1)
                self._store = (host, int(port))
            while True:
                roster, _ = member.wait_for_rank()
                self._entered[roster.generation] += 1
                self._entered_at[roster.generation] = time.monotonic()
                signals = GenerationStore(roster.generation, values, lambda: values)
                values.wait_until(signals.is_interrupted)
                member.leave("", roster.generation + 1)


def serve(share: Share, commands: Connection) -> None:
    """Run members in this process, and execute commands until the benchmark closes the connection."""
    os.environ[TOKEN_ENV] = share.token
    members = Members(share)
    with suppress(EOFError):
        while True:
            name, *arguments = commands.recv()
            commands.send(getattr(members, name)(*arguments))
    os._exit(0)
