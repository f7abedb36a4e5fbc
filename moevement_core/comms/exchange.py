"""Messages between ranks outside of training: data of a type that both sides know, never pickled objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_object_coll_device

from moevement_core.comms.codec import decode, encode
from moevement_core.errors import ExchangeError


def all_gather_objects(mine: Any, kind: Any, group: Any = None) -> list[Any]:
    """Returns what every rank gave, by rank; every rank of ``group`` calls it at the same point.

    Args:
        mine: of this rank.
        kind: the type of it, the same on all ranks; what comes is checked against it.
        group: of all ranks, where none is given.

    Raises:
        ExchangeError: something else came. On every rank alike.
    """
    device, world = torch.device(_get_object_coll_device(group)), dist.get_world_size(group)
    data = torch.frombuffer(bytearray(encode(mine)), dtype=torch.uint8)
    sizes = torch.zeros(world, dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(sizes, torch.tensor([data.numel()], device=device), group=group)
    known = sizes.tolist()
    sent = torch.zeros(max(known), dtype=torch.uint8, device=device)
    sent[: data.numel()] = data.to(device)
    received = torch.empty(world * max(known), dtype=torch.uint8, device=device)
    dist.all_gather_into_tensor(received, sent, group=group)
    rows = received.cpu().view(world, max(known))
    return [_decoded(rows[rank, :size], kind, rank) for rank, size in enumerate(known)]


def broadcast_object(mine: Any, kind: Any, source: int = 0) -> Any:
    """Returns what the rank ``source`` gave; every rank calls it at the same point.

    Args:
        mine: of this rank; of no concern on any but ``source``.
        kind: see :func:`all_gather_objects`.
        source: a rank.

    Raises:
        ExchangeError: something else came. On every rank alike.
    """
    device = torch.device(_get_object_coll_device(None))
    data = torch.frombuffer(bytearray(encode(mine)), dtype=torch.uint8) if dist.get_rank() == source else None
    size = torch.tensor([data.numel() if data is not None else 0], device=device)
    dist.broadcast(size, source)
    received = data.to(device) if data is not None else torch.empty(int(size.item()), dtype=torch.uint8, device=device)
    dist.broadcast(received, source)
    return _decoded(received.cpu(), kind, source)


def from_rank_zero(answer: Callable[[], Any], kind: Any) -> Any:
    """Returns what ``answer`` gives on rank 0, where alone it is called; every rank calls this at the same point.

    For what ranks may see differently (a file, the time), so that each of them goes on alike.

    Args:
        answer: where it raises, the others wait for it.
        kind: see :func:`all_gather_objects`.

    Raises:
        ExchangeError: something else came. On every rank alike.
    """
    return broadcast_object(answer() if dist.get_rank() == 0 else None, kind)


def _decoded(data: torch.Tensor, kind: Any, rank: int) -> Any:
    try:
        return decode(memoryview(data.numpy()), kind)
    except ExchangeError as error:
        raise ExchangeError(f"from rank {rank}: {error}") from None
