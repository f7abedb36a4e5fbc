"""Collective exchange of Python values between ranks: data of a type that all ranks know, never pickled objects."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from moevement_core.comms.codec import decode, encode
from moevement_core.comms.job_group import job_group
from moevement_core.comms.transport import Transport
from moevement_core.comms.tree import TreeGroup
from moevement_core.errors import ExchangeError

_SIZE = struct.Struct("!Q")
_TAG = 0
_RAW, _COMPRESSED = b"\0", b"\1"
"""First byte of an exchanged value: the form of the bytes that follow."""
_LONG_BYTES = 1024


def all_gather_objects(local: Any, kind: Any, group: TreeGroup | None = None) -> list[Any]:
    """Return the values of all ranks, by rank. Collective: every rank calls it at the same point.

    Args:
        local: value of this rank.
        kind: type of the values, the same on all ranks; received values must have this type.
        group: ranks that exchange values; None for all ranks.

    Raises:
        ExchangeError: a received value has another type. Every rank raises it.
    """
    group = group or job_group()
    return [_decoded(data, kind, rank) for rank, data in zip(group.ranks, group.gather(_encoded(local)), strict=True)]


def broadcast_object(local: Any, kind: Any, source: int = 0) -> Any:
    """Return the value of the rank ``source``. Collective: every rank calls it at the same point.

    Args:
        local: value to send; ignored on all ranks but ``source``.
        kind: type of the value; see :func:`all_gather_objects`.
        source: rank that sends its value.

    Raises:
        ExchangeError: the received value has another type. Every rank raises it.
    """
    data = _encoded(local) if dist.get_rank() == source else b""
    return _decoded(job_group().broadcast(data, source), kind, source)


def send_object(transport: Transport, peer: int, value: Any) -> None:
    """Send a value to the rank ``peer``, which calls :func:`receive_object`.

    Raises:
        RuntimeError: the peer is lost.
    """
    data = _encoded(value)
    transport.send(peer, _TAG, torch.frombuffer(bytearray(_SIZE.pack(len(data)) + data), dtype=torch.uint8))


def receive_object(transport: Transport, peer: int, kind: Any) -> Any:
    """Return the value that the rank ``peer`` sends with :func:`send_object`.

    Raises:
        RuntimeError: the peer is lost.
        ExchangeError: the received value has another type.
    """
    size = torch.empty(_SIZE.size, dtype=torch.uint8)
    transport.receive(peer, _TAG, size)
    data = torch.empty(_SIZE.unpack(size.numpy().tobytes())[0], dtype=torch.uint8)
    transport.receive(peer, _TAG, data)
    return _decoded(data.numpy().tobytes(), kind, peer)


def from_rank_zero(answer: Callable[[], Any], kind: Any) -> Any:
    """Call ``answer`` on rank 0, and return the result on every rank.

    Collective: every rank calls the function at the same point. It is for facts that ranks may see differently, such as
    a file or the time. All ranks then decide by what rank 0 sees.

    Args:
        answer: function that only rank 0 calls. If it raises an error, the other ranks keep waiting.
        kind: type of the result; see :func:`all_gather_objects`.

    Raises:
        ExchangeError: the received result has another type. Every rank raises it.
    """
    return broadcast_object(answer() if dist.get_rank() == 0 else None, kind)


def _encoded(value: Any) -> bytes:
    """Return the encoded value, compressed if it is long: lists of snapshots shrink to less than a tenth."""
    data = encode(value)
    return _RAW + data if len(data) < _LONG_BYTES else _COMPRESSED + zlib.compress(data, level=1)


def _decoded(data: bytes, kind: Any, rank: int) -> Any:
    try:
        form, rest = data[:1], data[1:]
        return decode(zlib.decompress(rest) if form == _COMPRESSED else rest, kind)
    except zlib.error as error:
        raise ExchangeError(f"from rank {rank}: received data cannot be decompressed: {error}") from None
    except ExchangeError as error:
        raise ExchangeError(f"from rank {rank}: {error}") from None
