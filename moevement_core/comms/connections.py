"""TCP connections between ranks for data outside training; a connection is made at its first use.

This module does not use process groups, for two reasons. A gloo group connects every rank with every other rank. And in
torch 2.13, a gloo receive never ends if the connection breaks after some of the bytes have arrived. The receiving rank
would hang if the sending rank died during a send.

Both sides of a connection prove that they belong to this job and generation (the time between two failures). For this
proof each side sends a MAC over the nonces of both sides and over the purpose of the connection. A caller is a process
that connects to this rank. The rank limits the number of callers without this proof, the bytes that it reads from each
of them, and the time for the proof.
"""

from __future__ import annotations

import secrets
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
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
"""Seconds within which a caller (a process that connects to this rank) must prove that it belongs to the job."""

RETRY_S = 1.0
"""Seconds between two attempts to accept connections, after an error such as a lack of descriptors."""

_SO_MAX_PACING_RATE = getattr(socket, "SO_MAX_PACING_RATE", 47)
"""Linux's socket option that limits the sending rate; see socket(7). Python has no name for it."""
_UNLIMITED = 0xFFFFFFFF
"""Rate in bytes per second that the kernel treats as no limit: 34 Gbit/s. Higher limits cannot be set."""
_TCP_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", 25)
UNSENT_BYTES = 1 << 20
"""Most unsent bytes in the kernel's buffer of a connection. The kernel sends them even if this rank pauses sends."""
UNSENT_PACED_S = 0.005
LEAST_UNSENT_BYTES = 32 << 10
"""Smallest limit on the unsent bytes of a connection whose rate is limited.

At high rates, the limit is the bytes that the connection may send in :data:`UNSENT_PACED_S` seconds. The limit
is small, because a message of training may have to wait until the kernel has sent these bytes.
"""

LOWER_EFFORT = 1
"""DSCP (the class of traffic in an IP header) of packets that may wait for all other packets (RFC 8622)."""
BULK = 2
"""Linux's priority of bulk traffic: the last of the three bands of ``pfifo_fast`` (tc-prio(8))."""

MOST_UNKNOWN = 256
"""Most connections whose caller has not yet proved that it belongs to the job. When one more arrives, this
rank closes the oldest of them."""

_HELLO = struct.Struct("!16s16sqqq")
"""First message on a connection: nonce, name of the channel, rank of the caller, tag, number of the stream."""
_ANSWER = struct.Struct("!16s32s")
"""Answer of the called rank: nonce and MAC. The caller then sends its own MAC."""

_Key = tuple[str, int, int, int]
"""Key of a connection: name of the channel, rank at the other end, tag, and number of the stream."""


@dataclass(frozen=True)
class Address:
    """Address at which a rank listens, and the secret that another rank needs to connect to it."""

    host: str
    port: int
    secret: bytes
    """Secret that the listening rank made for this generation. Both sides of a connection prove that they have it."""


class Connections(Refusable):
    """Connections of one rank in one generation.

    A connection carries the messages of one channel from one sender to one receiver with one tag.

    Args:
        host: address of this host at which other ranks reach this rank.
        streams: number of parallel connections (streams) for each channel, sender, receiver and tag. Every rank must
            give the same number.
        is_source: True if ``host`` is also the source address of connections to other ranks; False if the routes of the
            host determine the source address.
    """

    def __init__(self, host: str, streams: int = 1, *, is_source: bool = False) -> None:
        self.streams = streams
        self._source = (host, 0) if is_source else None
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=1024)
        self._sockets = {self._listener}
        self._unknown: dict[socket.socket, None] = {}
        """Connections whose caller has not yet proved that it belongs to the job, the oldest first."""
        self._to: dict[_Key, socket.socket] = {}
        self._from: dict[_Key, socket.socket] = {}
        self._background = set[str]()
        """Names of the channels whose messages may wait for messages of training."""
        self.address = Address(host, self._listener.getsockname()[1], secrets.token_bytes(16))
        super().__init__()  # last, because another thread may call shut_down() at once

    @cached_property
    def addresses(self) -> Sequence[Address] | Mapping[int, Address]:
        """Addresses of the ranks to which this rank connects, by rank."""
        raise RuntimeError("addresses of the ranks are not known yet; call open() first")

    def open(self, rank: int, addresses: Sequence[Address] | Mapping[int, Address]) -> None:
        """Begin to accept connections of other ranks; called once, when this rank knows the addresses of its peers.

        Args:
            rank: this rank.
            addresses: addresses of the ranks to which this rank connects, by rank.

        Raises:
            RuntimeError: communication was aborted before.
        """
        self.refuse_if_aborted()
        self._rank, self.addresses = rank, addresses
        threading.Thread(target=self._accept, name="moevement-accept", daemon=True).start()

    def channel(self, name: str, *, is_background: bool = False) -> Transport:
        """Return a transport whose messages are separate from those of other channels.

        Args:
            name: name of the channel, at most 16 bytes.
            is_background: True if messages of the channel may wait for messages of training. The setting has an effect
                only where queues of the host or the network treat classes of traffic differently.
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
        """Return the connection for bytes to ``peer``, and make it if needed.

        Only one thread at a time may call this for the same arguments.
        """
        if (connection := self._to.get((channel, peer, tag, stream))) is not None:
            return connection
        address = self.addresses[peer]
        connection = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET)
        self._keep(connection)
        connection.settimeout(CONNECT_S)
        if self._source is not None:
            connection.bind(self._source)
        connection.connect((address.host, address.port))
        self.refuse_if_aborted()  # an abort during connect() could not shut down the unconnected socket
        connection.settimeout(None)  # no limit, because a rank that was stopped (SIGSTOP) answers once it continues
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
            raise ConnectionError("another process answers at the address of that rank")
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
                log.warning(f"this rank cannot accept a connection, and tries again in {RETRY_S:g} s: {error}")
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
                    oldest.shutdown(socket.SHUT_RDWR)  # the thread that greets this caller closes the socket

    def _welcome(self, caller: socket.socket) -> None:
        """Register a caller's connection; close it if the caller does not prove in time that it belongs to the job."""
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
        """Return the key of a caller's connection, after the caller has proved that it belongs to this generation."""
        caller.settimeout(GREETING_S)
        caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello, mac = bytearray(_HELLO.size), bytearray(MAC_BYTES)
        _receive_all(caller, memoryview(hello))
        nonce, token = secrets.token_bytes(16), _token_of(self.address)
        caller.sendall(_ANSWER.pack(nonce, token.mac("called", bytes(hello), nonce)))
        _receive_all(caller, memoryview(mac))
        if not token.verifies(bytes(mac), "caller", bytes(hello), nonce):
            raise ConnectionError("the caller belongs to another job or generation")
        caller.settimeout(None)
        _, channel, rank, tag, stream = _HELLO.unpack(hello)
        return channel.rstrip(b"\0").decode(), rank, tag, stream


def _token_of(address: Address) -> Token:
    """Return the token for connections to ``address``: the secret of that rank, and the job's token if there is one."""
    job = given_token()
    return Token(address.secret.hex() + (job.text if job is not None else ""))


def _lower_class(connection: socket.socket) -> None:
    """Mark the bytes of a connection, so that queues of this host and of the network let other traffic pass first."""
    if connection.family == socket.AF_INET6:
        option = (socket.IPPROTO_IPV6, socket.IPV6_TCLASS)
    else:
        option = (socket.IPPROTO_IP, socket.IP_TOS)
    with suppress(OSError):  # a sandbox may refuse the options
        connection.setsockopt(*option, LOWER_EFFORT << 2)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, BULK)  # last, because IP_TOS sets it too


def _pace(connection: socket.socket, bytes_per_s: float) -> None:
    """Limit the sending rate of a connection, if the kernel can do that."""
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
