"""TCP connections between ranks beside training, each made when it is first used.

They are no process groups. A gloo group connects every rank with every other. In torch 2.13, a receive that has got a
part of its bytes never ends when its connection does. So a rank that dies while it sends would take the receiving rank
with it.

Both sides of a connection show each other that they belong to this job and generation. They send a MAC over nonces of
both, and over the purpose of the connection. Until a caller has shown it, limits hold for the number of such callers,
their bytes and their time.
"""

from __future__ import annotations

import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import override

import torch

from moevement_core import log
from moevement_core.comms.stripes import STRIPE_BYTES, Stripes
from moevement_core.comms.token import MAC_BYTES, Token, given_token
from moevement_core.comms.transport import Refusable, Transport, changed, lock

CONNECT_S = 30.0
"""Seconds within which a connection must be made."""
GREETING_S = 30.0
"""Seconds within which a caller must show which rank it is."""

RETRY_S = 1.0
"""Seconds until the next attempt to accept, for example if the host has no descriptors left."""

_SO_MAX_PACING_RATE = getattr(socket, "SO_MAX_PACING_RATE", 47)
"""Linux's option for the rate of a socket, which Python does not name; see socket(7)."""
_UNLIMITED = 0xFFFFFFFF
"""Rate that the kernel takes for no limit, in bytes per second; it is 34 Gbit/s for one connection."""
_TCP_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", 25)
UNSENT_BYTES = 1 << 20
"""Most unsent bytes inside a connection; they leave even if sends pause."""
UNSENT_PACED_S = 0.005
LEAST_UNSENT_BYTES = 32 << 10
"""Most unsent bytes of a connection with a rate: what it sends in :data:`UNSENT_PACED_S` seconds, but no fewer than
this. A message of training may wait for them."""

LOWER_EFFORT = 1
"""DSCP of traffic that may wait for all other traffic (RFC 8622)."""
BULK = 2
"""Linux's priority of bulk traffic: the last of the three bands of ``pfifo_fast`` (tc-prio(8))."""

MOST_UNKNOWN = 256
"""Most connections whose caller has not yet shown which rank it is; beyond that, the oldest is closed."""

_HELLO = struct.Struct("!16s16sqqq")
"""The caller's nonce, name of the channel, caller, tag, number among the connections of this direction."""
_ANSWER = struct.Struct("!16s32s")
"""The nonce of the rank that is called, and its MAC; the caller sends its own after it."""

_Key = tuple[str, int, int, int]
"""Channel, the other rank, tag, number of the connection."""


@dataclass(frozen=True)
class Address:
    """Address at which a rank listens."""

    host: str
    port: int
    secret: bytes
    """Secret of this rank in this generation."""


class Connections(Refusable):
    """Connections of one rank in one generation. Each serves one channel, sender, receiver and tag, in one direction.

    Args:
        host: address of this host that other ranks reach.
        streams: number of connections over which bytes of one direction are spread; the same on every rank.
        is_source: True if connections to others begin at ``host``, too; otherwise the host's routes choose the address.
    """

    def __init__(self, host: str, streams: int = 1, *, is_source: bool = False) -> None:
        super().__init__()
        self.streams = streams
        self._source = (host, 0) if is_source else None
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=1024)
        self._sockets = {self._listener}
        self._unknown: dict[socket.socket, None] = {}
        """Connections whose caller has not yet shown which rank it is, the oldest first."""
        self._to: dict[_Key, socket.socket] = {}
        self._from: dict[_Key, socket.socket] = {}
        self._background = set[str]()
        """Channels whose messages may wait."""
        self.address = Address(host, self._listener.getsockname()[1], secrets.token_bytes(16))

    @cached_property
    def addresses(self) -> Sequence[Address]:
        """Addresses of all ranks, this one included."""
        raise RuntimeError("open() comes first")

    def open(self, rank: int, addresses: Sequence[Address]) -> None:
        """Begin to accept connections of other ranks.

        Args:
            rank: this rank.
            addresses: addresses of all ranks of the job.
        """
        self._rank, self.addresses = rank, addresses
        threading.Thread(target=self._accept, name="moevement-accept", daemon=True).start()

    def channel(self, name: str, *, is_background: bool = False) -> Transport:
        """Return a transport whose messages are separate from those of other channels.

        Args:
            name: name of the channel, at most 16 bytes.
            is_background: True if its messages may wait for those of training, in a network with classes of traffic.
        """
        if is_background:
            self._background.add(name)
        return _Channel(self, name)

    @override
    def shut_down(self) -> None:
        for open_socket in self._sockets:
            with suppress(OSError):  # the socket is no longer connected
                open_socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close all connections; bytes that were sent still arrive."""
        with lock:
            self.is_refused = True
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            for open_socket in self._sockets:
                open_socket.close()
            changed.notify_all()

    def to(self, channel: str, peer: int, tag: int, stream: int = 0) -> socket.socket:
        """Return the connection for bytes to ``peer``, and make it if needed; for one thread at a time."""
        if (connection := self._to.get((channel, peer, tag, stream))) is not None:
            return connection
        address = self.addresses[peer]
        connection = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET)
        self._keep(connection)
        connection.settimeout(CONNECT_S)
        if self._source is not None:
            connection.bind(self._source)
        connection.connect((address.host, address.port))
        self.refuse_if_aborted()  # an abort could not shut the socket down before it was connected
        connection.settimeout(None)  # a stopped rank answers once it continues
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(OSError):  # systems other than Linux keep more unsent bytes
            connection.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        if channel in self._background:
            _lower_class(connection)
        hello = _HELLO.pack(secrets.token_bytes(16), channel.encode(), self._rank, tag, stream)
        connection.sendall(hello)
        answer = bytearray(_ANSWER.size)
        _receive_all(connection, memoryview(answer))
        nonce, mac = _ANSWER.unpack(answer)
        token = _token_of(address)
        if not token.verifies(mac, "called", hello, nonce):
            raise ConnectionError("another process answers there")
        connection.sendall(token.mac("caller", hello, nonce))
        self._to[channel, peer, tag, stream] = connection
        return connection

    def come_from(self, channel: str, peer: int, tag: int, stream: int = 0) -> socket.socket:
        """Return the connection for bytes from ``peer``; wait until ``peer`` has made it."""
        key = (channel, peer, tag, stream)
        with lock:
            changed.wait_for(lambda: self.is_refused or key in self._from)
            self.refuse_if_aborted()
            return self._from[key]

    def _keep(self, connection: socket.socket) -> None:
        with lock:
            if self.is_refused:
                connection.close()
            self.refuse_if_aborted()
            self._sockets.add(connection)

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError as error:
                if self.is_refused:
                    return
                log.warning(f"a connection of another rank cannot be accepted, and is tried again: {error}")
                time.sleep(RETRY_S)
                continue
            self._make_room(caller)
            threading.Thread(target=self._welcome, args=(caller,), name="moevement-welcome", daemon=True).start()

    def _make_room(self, caller: socket.socket) -> None:
        with lock:
            self._unknown[caller] = None
            if len(self._unknown) > MOST_UNKNOWN:
                oldest = next(iter(self._unknown))
                del self._unknown[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it

    def _welcome(self, caller: socket.socket) -> None:
        """Register the connection of a caller, or close it if the caller does not show in time that it is a rank of
        this generation.
        """
        try:
            self._keep(caller)
            key = self._greet(caller)
        except (OSError, RuntimeError, UnicodeDecodeError):
            with lock:
                self._sockets.discard(caller)
                self._unknown.pop(caller, None)
            caller.close()
            return
        with lock:
            self._unknown.pop(caller, None)
            self._from[key] = caller
            changed.notify_all()

    def _greet(self, caller: socket.socket) -> _Key:
        """Return the key of a caller's connection, once the caller has shown that it belongs to the generation."""
        caller.settimeout(GREETING_S)
        caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello, mac = bytearray(_HELLO.size), bytearray(MAC_BYTES)
        _receive_all(caller, memoryview(hello))
        nonce, token = secrets.token_bytes(16), _token_of(self.address)
        caller.sendall(_ANSWER.pack(nonce, token.mac("called", bytes(hello), nonce)))
        _receive_all(caller, memoryview(mac))
        if not token.verifies(bytes(mac), "caller", bytes(hello), nonce):
            raise ConnectionError("of another job, or generation")
        caller.settimeout(None)
        _, channel, rank, tag, stream = _HELLO.unpack(hello)
        return channel.rstrip(b"\0").decode(), rank, tag, stream


def _token_of(address: Address) -> Token:
    """Return the token of the ranks of this generation, made with the job's token if there is one."""
    job = given_token()
    return Token(address.secret.hex() + (job.text if job is not None else ""))


def _lower_class(connection: socket.socket) -> None:
    """Put sent bytes into the class of traffic that may wait, in the queues of this host and of the network."""
    if connection.family == socket.AF_INET6:
        option = (socket.IPPROTO_IPV6, socket.IPV6_TCLASS)
    else:
        option = (socket.IPPROTO_IP, socket.IP_TOS)
    with suppress(OSError):  # a sandbox may refuse it
        connection.setsockopt(*option, LOWER_EFFORT << 2)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, BULK)  # the option above changes it, too


def _pace(connection: socket.socket, bytes_per_s: float) -> None:
    """Let the kernel spread sent bytes over time, if it can."""
    is_limited = bytes_per_s < _UNLIMITED
    rate = max(1, int(bytes_per_s)) if is_limited else _UNLIMITED
    with suppress(OSError):  # systems other than Linux send as fast as the link allows
        connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("=I", rate))
        paced = max(LEAST_UNSENT_BYTES, int(rate * UNSENT_PACED_S))
        unsent = min(paced, UNSENT_BYTES) if is_limited else UNSENT_BYTES
        connection.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, unsent)


class _Channel(Transport):
    def __init__(self, connections: Connections, name: str) -> None:
        self._connections, self._name = connections, name
        self._sent, self._received = Stripes(connections.streams), Stripes(connections.streams)

    @override
    def send(self, peer: int, tag: int, data: torch.Tensor) -> None:
        with self._connections.under_way():
            try:
                self._sent.carry(
                    (peer, tag), data,
                    lambda stream, part: self._connections.to(self._name, peer, tag, stream).sendall(part),
                )  # fmt: skip
            except OSError as error:
                raise RuntimeError(f"connection to rank {peer}: {error}") from error

    @property
    @override
    def parallel_bytes(self) -> int:
        streams = self._connections.streams
        return streams * STRIPE_BYTES if streams > 1 else 0

    @override
    def pace(self, peer: int, tag: int, bytes_per_s: float) -> None:
        streams = self._connections.streams
        with self._connections.under_way():
            try:
                for stream in range(streams):
                    _pace(self._connections.to(self._name, peer, tag, stream), bytes_per_s / streams)
            except OSError as error:
                raise RuntimeError(f"connection to rank {peer}: {error}") from error

    @override
    def receive(self, peer: int, tag: int, data: torch.Tensor) -> None:
        with self._connections.under_way():
            try:
                self._received.carry(
                    (peer, tag), data,
                    lambda stream, part: _receive_all(
                        self._connections.come_from(self._name, peer, tag, stream), part
                    ),
                )  # fmt: skip
            except OSError as error:
                raise RuntimeError(f"connection from rank {peer}: {error}") from error


def _receive_all(connection: socket.socket, view: memoryview) -> None:
    while view.nbytes:
        if not (received := connection.recv_into(view, view.nbytes, socket.MSG_WAITALL)):
            raise ConnectionError("closed by the other side")
        view = view[received:]
