"""Simulated network: links with delays, partitions that heal, connections that break or fall silent."""

from __future__ import annotations

import selectors
import socket
from collections import defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from moevement_core.comms.connections import Address
from moevement_core.comms.transport import Transport
from tests.simulation.modules import Waiting, world
from tests.simulation.world import Process, World

COORDINATOR = "coordinator"
"""Host of the coordinator and of the store."""
SLOW_S = 1.0


class Network:
    """Network between the hosts of one simulation.

    Args:
        simulation: simulation whose clock and random numbers the network uses.
        slowest_s: longest delay of a message while nothing is wrong, in seconds.
        drop: share of messages that are lost; each is sent again after a while, as TCP does.
        beside_s: longest additional delay of a message that a :class:`Channel` sends, in seconds.
    """

    def __init__(self, simulation: World, slowest_s: float, drop: float, beside_s: float) -> None:
        self.beside_s = beside_s
        self.world, self.slowest_s, self.drop = simulation, slowest_s, drop
        self.cut: set[str] = set()
        """Hosts that are cut off from all others."""
        self.dark: set[str] = set()
        """Hosts without power, whose kernels refuse no connection."""
        self.slow: set[str] = set()
        """Hosts whose channels send and receive slowly."""
        self.healed = Waiting()
        self._last: dict[Any, float] = {}
        self._held: list[tuple[str, str, Callable[[], None], Any]] = []
        self.listeners: dict[Any, Listener] = {}
        self.arrivals: defaultdict[Process, Waiting] = defaultdict(Waiting)
        """Tasks of each process that wait until something arrives at any of its sockets."""
        self.connections: list[Connections] = []
        """Connections of ranks; the index is the port."""

    def reaches(self, host: str, other: str) -> bool:
        """Return True if messages travel between the two hosts."""
        return host == other or not ({host, other} & (self.cut | self.dark))

    def delay_s(self, host: str, other: str) -> float:
        """Return the seconds that the next message takes between the two hosts."""
        rng = self.world.rng
        seconds = rng.uniform(0.0002, self.slowest_s if host != other else 0.0005)
        while rng.random() < self.drop:
            seconds += 0.2
        return seconds

    def deliver(
        self, source: str, target: str, action: Callable[[], None], order: Any, *, is_beside: bool = False
    ) -> None:
        """Call ``action`` when a message arrives at ``target``; messages with the same ``order`` arrive in order.

        Args:
            source: host that sends.
            target: host that receives.
            action: function that is called on arrival.
            order: key of the messages that arrive in the order in which they were sent.
            is_beside: True if a :class:`Channel` sends the message.
        """
        if not self.reaches(source, target):
            self._held.append((source, target, action, order))
            return
        late_s = 0.0
        if is_beside:
            late_s = self.world.rng.uniform(0.0, SLOW_S if {source, target} & self.slow else self.beside_s)
        at = max(self._last.get(order, 0.0), self.world.now + self.delay_s(source, target) + late_s)
        self._last[order] = at
        self.world.after(at - self.world.now, lambda: self._arrive(source, target, action, order))

    def _arrive(self, source: str, target: str, action: Callable[[], None], order: Any) -> None:
        if self.reaches(source, target):
            action()
        else:
            self._held.append((source, target, action, order))

    def isolate(self, host: str) -> None:
        """Cut a host off from all others."""
        self.cut.add(host)

    def heal(self, host: str) -> None:
        """Reconnect a host, and deliver the messages that were held back."""
        self.cut.discard(host)
        held, self._held = self._held, []
        for source, target, action, order in held:
            self.deliver(source, target, action, order)
        self.healed.wake_all()

    def round_trip(self, process: Process, other: str) -> None:
        """Block for the delay of a request, and until the other host is reachable."""
        self.world.sleep(self.delay_s(process.node, other))
        self.healed.until(lambda: self.reaches(process.node, other))


# Connections of supervisors


class Socket:
    """End of a connection between two simulated processes."""

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

    def getsockname(self) -> tuple[str, int]:
        return self.process.node, 0

    def getpeername(self) -> tuple[str, int]:
        assert self.other is not None
        return self.other.process.node, 0

    def shutdown(self, _: int) -> None:
        pass

    def send(self, data: bytes) -> int:
        if self.is_closed or self.is_broken:
            raise ConnectionResetError("closed by the other side")
        assert self.other is not None
        other, whole = self.other, bytes(data)
        self.network.deliver(self.process.node, other.process.node, lambda: other._take(whole), self)
        return len(whole)

    def _take(self, data: bytes) -> None:
        self.inbox.append(data)
        self.network.arrivals[self.process].wake_all()

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
        self.network.arrivals[self.process].wake_all()

    @property
    def is_ready(self) -> bool:
        return bool(self.inbox or self.is_broken)


class Listener:
    """Listening socket of a simulated process.

    Args:
        network: network that leads to the socket.
        process: process that listens.
        port: port, or name of a Unix socket.
    """

    def __init__(self, network: Network, process: Process, port: Any) -> None:
        self.network, self.process, self.port = network, process, port
        self.waiting: deque[Socket] = deque()
        network.listeners[port] = self
        process.on_end.append(lambda _: self.close())

    def take(self, connection: Socket) -> None:
        """Add a connection that a process has made."""
        self.waiting.append(connection)
        self.network.arrivals[self.process].wake_all()

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


def connected(network: Network, process: Process, port: Any) -> Socket:
    """Return a new connection of a process to a listener.

    Raises:
        ConnectionRefusedError: no process listens there.
    """
    if (listener := network.listeners.get(port)) is None:
        raise ConnectionRefusedError
    here, there = Socket(network, process), Socket(network, listener.process)
    here.other, there.other = there, here
    network.deliver(process.node, listener.process.node, lambda: listener.take(there), here)
    return here


def sockets(network: Network) -> SimpleNamespace:
    """Return a stand-in for the module ``socket``, for supervisors and standbys."""

    def create_connection(address: tuple[str, int], timeout: float | None = None) -> Socket:
        task = world().current()
        if not network.reaches(task.process.node, address[0]):
            world().sleep(timeout or 60.0)
            raise TimeoutError("timed out")
        world().sleep(network.delay_s(task.process.node, address[0]))
        return connected(network, task.process, address[1])

    return SimpleNamespace(**{**vars(socket), "create_connection": create_connection})


class Selector:
    """Stand-in for the selector of a server or a client of signed lines."""

    def __init__(self) -> None:
        self._registered: dict[Any, Any] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> None:
        self._registered[fileobj] = SimpleNamespace(fileobj=fileobj, events=events, data=data)

    def unregister(self, fileobj: Any) -> None:
        del self._registered[fileobj]

    def select(self, timeout: float | None = None) -> list[tuple[Any, int]]:
        process = world().current().process
        if timeout:
            process.world.network.arrivals[process].until(self._ready, timeout)
        return self._ready()

    def _ready(self) -> list[tuple[Any, int]]:
        return [(key, key.events) for key in self._registered.values() if key.fileobj.is_ready]

    def close(self) -> None:
        self._registered.clear()


SELECTORS = SimpleNamespace(DefaultSelector=Selector, EVENT_READ=selectors.EVENT_READ)


# Connections of ranks outside of process groups


class Connections:
    """Stand-in for a rank's connections to other ranks in one generation."""

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
        """Ranks whose connections to this rank are broken."""
        self.process.connections.append(self)
        self.process.on_end.append(self._process_ended)

    def open(self, rank: int, addresses: list[Address]) -> None:
        self.rank, self.others = rank, [self.network.connections[address.port] for address in addresses]

    def channel(self, name: str, *, is_background: bool = False) -> Channel:
        return Channel(self, name)

    def _process_ended(self, is_heard: bool) -> None:
        self.is_gone = True
        if is_heard:
            self._say_goodbye()

    def shut_down(self) -> None:
        """Abort all connections: calls that wait fail here at once, and at the other ranks a little later."""
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


class Channel(Transport):
    """Transport between ranks over simulated connections."""

    def __init__(self, connections: Connections, name: str) -> None:
        self._connections, self._name = connections, name

    def send(self, peer: int, tag: int, data: torch.Tensor) -> None:
        local, remote = self._connections, self._connections.others[peer]
        self._raise_if_broken(peer)
        key, copy = (self._name, local.rank, tag), data.clone()

        def arrive() -> None:
            remote.inboxes.setdefault(key, deque()).append(copy)
            remote.waiting.wake_all()

        local.network.deliver(
            local.process.node, remote.process.node, arrive, (local, peer, self._name, tag), is_beside=True
        )

    def receive(self, peer: int, tag: int, data: torch.Tensor) -> None:
        local, key, at = self._connections, (self._name, peer, tag), 0
        while at < data.numel():
            inbox = local.inboxes.setdefault(key, deque())
            if not inbox:
                self._raise_if_broken(peer)
                local.waiting.wait()
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
