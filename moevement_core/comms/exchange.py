"""Collective exchange of Python values between ranks: data of a type that all ranks know, never pickled objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_object_coll_device

from moevement_core.comms.codec import decode, encode
from moevement_core.errors import ExchangeError


def all_gather_objects(local: Any, kind: Any, group: Any = None) -> list[Any]:
    """Return the values of all ranks, by rank. Collective: every rank of ``group`` calls it at the same point.

    Args:
        local: value of this rank.
        kind: type of the values, the same on all ranks; received values must have this type.
        group: process group; None for all ranks.

    Raises:
        ExchangeError: a received value has another type. Every rank raises it.
    """
    device, world = torch.device(_get_object_coll_device(group)), dist.get_world_size(group)
    data = torch.frombuffer(bytearray(encode(local)), dtype=torch.uint8)
    sizes = torch.zeros(world, dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(sizes, torch.tensor([data.numel()], device=device), group=group)
    known = sizes.tolist()
    sent = torch.zeros(max(known), dtype=torch.uint8, device=device)
    sent[: data.numel()] = data.to(device)
    received = torch.empty(world * max(known), dtype=torch.uint8, device=device)
    dist.all_gather_into_tensor(received, sent, group=group)
    rows = received.cpu().view(world, max(known))
    return [_decoded(rows[rank, :size], kind, rank) for rank, size in enumerate(known)]


def broadcast_object(local: Any, kind: Any, source: int = 0) -> Any:
    """Return the value of the rank ``source``. Collective: every rank calls it at the same point.

    Args:
        local: value to send; ignored on all ranks but ``source``.
        kind: type of the value; see :func:`all_gather_objects`.
        source: rank that sends its value.

    Raises:
        ExchangeError: the received value has another type. Every rank raises it.
    """
    device = torch.device(_get_object_coll_device(None))
    data = torch.frombuffer(bytearray(encode(local)), dtype=torch.uint8) if dist.get_rank() == source else None
    size = torch.tensor([data.numel() if data is not None else 0], device=device)
    dist.broadcast(size, source)
    received = data.to(device) if data is not None else torch.empty(int(size.item()), dtype=torch.uint8, device=device)
    dist.broadcast(received, source)
    return _decoded(received.cpu(), kind, source)


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


def _decoded(data: torch.Tensor, kind: Any, rank: int) -> Any:
    try:
        return decode(memoryview(data.numpy()), kind)
    except ExchangeError as error:
        raise ExchangeError(f"from rank {rank}: {error}") from None
