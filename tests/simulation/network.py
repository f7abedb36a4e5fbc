"""What processes send each other: links with delays, partitions that heal, connections that break or fall silent."""

from __future__ import annotations

import selectors
import socket
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from moevement_core.comms.connections import Address
from tests.simulation.modules import Waiting, world
from tests.simulation.world import Process, World

COORDINATOR = "coordinator"
"""The host of the coordinator and of the store."""
SLOW_S = 1.0


class Network:
    """Between the hosts of one simulation.

    Args:
        slowest_s: what a message takes at most while nothing is wrong.
        beside_s: what is sent beside training takes so much longer, at most.
        drop: the share of messages that are lost and sent again, as TCP does, after a while.
    """

    def __init__(self, its: World, slowest_s: float, drop: float, beside_s: float) -> None:
        self.beside_s = beside_s
        self.world, self.slowest_s, self.drop = its, slowest_s, drop
        self.cut: set[str] = set()
        """Hosts that nobody reaches and that reach nobody."""
        self.slow: set[str] = set()
        """Hosts to and from which what is sent beside training takes long."""
        self.healed = Waiting()
        self._last: dict[Any, float] = {}
        self._held: list[tuple[str, str, Callable[[], None], Any]] = []
        self.listeners: dict[int, Listener] = {}
        self.connections: list[Connections] = []
        """By port."""

    def reaches(self, one: str, other: str) -> bool:
        """Whether messages get from one host to the other."""
        return one == other or not ({one, other} & self.cut)

    def delay_s(self, one: str, other: str) -> float:
        """Of the next message."""
        rng = self.world.rng
        seconds = rng.uniform(0.0002, self.slowest_s if one != other else 0.0005)
        while rng.random() < self.drop:
            seconds += 0.2
        return seconds

    def deliver(self, one: str, other: str, what: Callable[[], None], order: Any, *, is_beside: bool = False) -> None:
        """Have ``what`` happen at the other host; in the order of calls for everything of one ``order``.

        Args:
            one: from where.
            other: to where.
            what: happens then.
            order: what it is in order with.
            is_beside: whether it is sent beside training.
        """
        if not self.reaches(one, other):
            self._held.append((one, other, what, order))
            return
        late_s = 0.0
        if is_beside:
            late_s = self.world.rng.uniform(0.0, SLOW_S if {one, other} & self.slow else self.beside_s)
        at = max(self._last.get(order, 0.0), self.world.now + self.delay_s(one, other) + late_s)
        self._last[order] = at
        self.world.after(at - self.world.now, lambda: self._arrive(one, other, what, order))

    def _arrive(self, one: str, other: str, what: Callable[[], None], order: Any) -> None:
        if self.reaches(one, other):
            what()
        else:
            self._held.append((one, other, what, order))

    def isolate(self, host: str) -> None:
        """Cut it off."""
        self.cut.add(host)

    def heal(self, host: str) -> None:
        """Let what has waited go."""
        self.cut.discard(host)
        held, self._held = self._held, []
        for one, other, what, order in held:
            self.deliver(one, other, what, order)
        self.healed.wake_all()

    def round_trip(self, process: Process, other: str) -> None:
        """Wait as long as a question takes; for ever while the other host is not reached."""
        self.world.sleep(self.delay_s(process.node, other))
        self.healed.until(lambda: self.reaches(process.node, other))


# Connections of supervisors


class Socket:
    """One end of a connection."""

    def __init__(self, network: Network, process: Process) -> None:
        self.network, self.process = network, process
        self.other: Socket | None = None
        self.inbox: deque[bytes] = deque()
        self.is_closed = self.is_broken = False
        process.on_end.append(self._process_ended)

    def setblocking(self, _: bool) -> None:
        pass

    def settimeout(self, _: float | None) -> None:
        pass

    def setsockopt(self, *_: Any) -> None:
        pass

    def recv(self, count: int) -> bytes:
        if self.is_closed:
            raise OSError("closed")
        if self.inbox:
            data = self.inbox.popleft()
            if len(data) > count:
                self.inbox.appendleft(data[count:])
            return data[:count]
        if self.is_broken:
            return b""
        raise BlockingIOError

    def send(self, data: bytes) -> int:
        if self.is_closed or self.is_broken:
            raise ConnectionResetError("closed by the other side")
        assert self.other is not None
        other, whole = self.other, bytes(data)
        self.network.deliver(self.process.node, other.process.node, lambda: other.inbox.append(whole), self)
        return len(whole)

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._say_goodbye()

    def _process_ended(self, is_heard: bool) -> None:
        if not self.is_closed:
            self.is_closed = True
            if is_heard:
                self._say_goodbye()

    def _say_goodbye(self) -> None:
        if (other := self.other) is not None:
            self.network.deliver(self.process.node, other.process.node, other._break, self)

    def _break(self) -> None:
        self.is_broken = True

    @property
    def is_ready(self) -> bool:
        return bool(self.inbox or self.is_broken)


class Listener:
    """A socket that listens."""

    def __init__(self, network: Network, process: Process, port: int) -> None:
        self.network, self.process, self.port = network, process, port
        self.waiting: deque[Socket] = deque()
        network.listeners[port] = self

    def setblocking(self, _: bool) -> None:
        pass

    def accept(self) -> tuple[Socket, Any]:
        if not self.waiting:
            raise BlockingIOError
        return self.waiting.popleft(), None

    def close(self) -> None:
        self.network.listeners.pop(self.port, None)

    @property
    def is_ready(self) -> bool:
        return bool(self.waiting)


def sockets(network: Network) -> SimpleNamespace:
    """What the lease client takes for ``socket``."""

    def create_connection(address: tuple[str, int], timeout: float | None = None) -> Socket:
        task = world().current()
        if not network.reaches(task.process.node, COORDINATOR):
            world().sleep(timeout or 60.0)
            raise TimeoutError("timed out")
        world().sleep(network.delay_s(task.process.node, COORDINATOR))
        listener = network.listeners.get(address[1])
        if listener is None:
            raise ConnectionRefusedError
        here, there = Socket(network, task.process), Socket(network, listener.process)
        here.other, there.other = there, here
        network.deliver(task.process.node, COORDINATOR, lambda: listener.waiting.append(there), here)
        return here

    return SimpleNamespace(**{**vars(socket), "create_connection": create_connection})


class Selector:
    """What the lease server takes for a selector."""

    def __init__(self) -> None:
        self._registered: dict[Any, Any] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> None:
        self._registered[fileobj] = SimpleNamespace(fileobj=fileobj, events=events, data=data)

    def unregister(self, fileobj: Any) -> None:
        del self._registered[fileobj]

    def select(self, timeout: float | None = None) -> list[tuple[Any, int]]:
        if not (ready := self._ready()) and timeout:
            world().sleep(timeout)
            ready = self._ready()
        return ready

    def _ready(self) -> list[tuple[Any, int]]:
        return [(key, key.events) for key in self._registered.values() if key.fileobj.is_ready]

    def close(self) -> None:
        self._registered.clear()


SELECTORS = SimpleNamespace(DefaultSelector=Selector, EVENT_READ=selectors.EVENT_READ)


# Connections of ranks beside training


class Connections:
    """What a rank takes for its connections to others, in one generation."""

    def __init__(self, host: str) -> None:
        self.process = world().current().process
        self.network.connections.append(self)
        self.address = Address(self.process.node, len(self.network.connections) - 1, b"")
        self.others: list[Connections] = []
        self.rank = -1
        self.is_refused = self.is_gone = False
        self.inboxes: dict[tuple[str, int, int], deque[torch.Tensor]] = {}
        self.waiting = Waiting()
        self.broken: set[int] = set()
        """Ranks whose connections to this one are."""
        self.process.connections.append(self)
        self.process.on_end.append(self._process_ended)

    def open(self, rank: int, addresses: list[Address]) -> None:
        self.rank, self.others = rank, [self.network.connections[one.port] for one in addresses]

    def channel(self, name: str, *, is_background: bool = False) -> Channel:
        return Channel(self, name)

    def _process_ended(self, is_heard: bool) -> None:
        self.is_gone = True
        if is_heard:
            self._say_goodbye()

    def shut_down(self) -> None:
        """As an abort does: whatever waits ends with an error, here and, in a while, at the others."""
        if not self.is_refused:
            self.is_refused = True
            self.waiting.wake_all()
            self._say_goodbye()

    def close(self) -> None:
        self.shut_down()

    def _say_goodbye(self) -> None:
        for other in self.others:
            if other is not self:
                self.network.deliver(
                    self.process.node, other.process.node, lambda other=other: other._lost(self.rank),  # type: ignore[misc]
                    (self, other),
                )  # fmt: skip

    def _lost(self, rank: int) -> None:
        self.broken.add(rank)
        self.waiting.wake_all()

    @property
    def network(self) -> Network:
        return self.process.world.network


class Channel:
    """A transport between ranks."""

    parallel_bytes = 0

    def __init__(self, connections: Connections, name: str) -> None:
        self._connections, self._name = connections, name

    def send(self, peer: int, tag: int, data: torch.Tensor) -> None:
        ours, theirs = self._connections, self._connections.others[peer]
        self._raise_if_broken(peer)
        key, copy = (self._name, ours.rank, tag), data.clone()

        def arrive() -> None:
            theirs.inboxes.setdefault(key, deque()).append(copy)
            theirs.waiting.wake_all()

        ours.network.deliver(
            ours.process.node, theirs.process.node, arrive, (ours, peer, self._name, tag), is_beside=True
        )

    def receive(self, peer: int, tag: int, data: torch.Tensor) -> None:
        ours, key, at = self._connections, (self._name, peer, tag), 0
        while at < data.numel():
            inbox = ours.inboxes.setdefault(key, deque())
            if not inbox:
                self._raise_if_broken(peer)
                ours.waiting.wait()
                continue
            piece = inbox.popleft()
            if not at and piece.numel() == data.numel():
                data.copy_(piece)
                return
            count = min(piece.numel(), data.numel() - at)
            data[at : at + count] = piece[:count]
            at += count
            if count < piece.numel():
                inbox.appendleft(piece[count:])

    def _raise_if_broken(self, peer: int) -> None:
        if self._connections.is_refused:
            raise RuntimeError("communication has been aborted")
        if peer in self._connections.broken:
            raise RuntimeError(f"rank {peer} is gone")
