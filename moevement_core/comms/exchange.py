"""Collective exchange of Python values between ranks: data of a type that all ranks know, never pickled objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from moevement_core.comms.codec import decode, encode
from moevement_core.comms.job_group import job_group
from moevement_core.errors import ExchangeError


def all_gather_objects(local: Any, kind: Any) -> list[Any]:
    """Return the values of all ranks, by rank. Collective: every rank calls it at the same point.

    Args:
        local: value of this rank.
        kind: type of the values, the same on all ranks; received values must have this type.

    Raises:
        ExchangeError: a received value has another type. Every rank raises it.
    """
    return [_decoded(data, kind, rank) for rank, data in enumerate(job_group().gather(encode(local)))]


def broadcast_object(local: Any, kind: Any, source: int = 0) -> Any:
    """Return the value of the rank ``source``. Collective: every rank calls it at the same point.

    Args:
        local: value to send; ignored on all ranks but ``source``.
        kind: type of the value; see :func:`all_gather_objects`.
        source: rank that sends its value.

    Raises:
        ExchangeError: the received value has another type. Every rank raises it.
    """
    data = encode(local) if dist.get_rank() == source else b""
    return _decoded(job_group().broadcast(data, source), kind, source)


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


def _decoded(data: bytes, kind: Any, rank: int) -> Any:
    try:
        return decode(data, kind)
    except ExchangeError as error:
        raise ExchangeError(f"from rank {rank}: {error}") from None
