"""The store that ranks meet in. The launcher or the coordinator holds it, so that every rank, rank 0 too, may die."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psutil
import torch
from nvidia_resiliency_ext.inprocess.attribution import Interruption, InterruptionRecord
from nvidia_resiliency_ext.inprocess.store import StoreMixin

from megatron.moevement.restart.environment import MEMBER_ENV, STORE_ENV

TIMEOUT = timedelta(minutes=10)


def store_address() -> tuple[str, int] | None:
    """Where the job's store is, if there is one."""
    if not (address := os.environ.get(STORE_ENV)):
        return None
    host, port = address.rsplit(":", 1)
    return host, int(port)


def connect(address: tuple[str, int]) -> Any:
    """A client of the job's store."""
    return torch.distributed.TCPStore(*address, is_master=False, timeout=TIMEOUT)


def connect_breakable(address: tuple[str, int]) -> tuple[Any, set[int]]:
    """A client of the job's store, and the local ports of its connections.

    Whoever waits in it can be freed by shutting these down, while other clients of the same store go on.
    """
    before = _local_ports(address[1])
    return connect(address), _local_ports(address[1]) - before


def _local_ports(remote_port: int) -> set[int]:
    connections = psutil.Process().net_connections("tcp")
    return {each.laddr.port for each in connections if each.raddr and each.raddr.port == remote_port}


def meet_in_launcher_store(original: Callable[..., Any]) -> Callable[..., Any]:
    """``pretrain`` that initialises torch.distributed through the launcher's store, where there is one."""

    @functools.wraps(original)
    def pretrain(*args: Any, store: Any = None, **kwargs: Any) -> Any:
        if store is None and (address := store_address()):
            store = connect(address)
        return original(*args, store=store, **kwargs)

    return pretrain


def force_nccl_init(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """``maybe_force_nccl_backend_init`` that does so for a job that goes on after failures, too.

    Ending a group whose communicator was never made leaves kernels of its subgroups running. Megatron forces it under
    its own ``--inprocess-restart`` only.
    """

    @functools.wraps(original)
    def maybe_force_nccl_backend_init(device_id: Any) -> None:
        original(device_id)
        if MEMBER_ENV in os.environ and device_id is not None and torch.distributed.get_backend() == "nccl":
            torch.distributed.all_reduce(torch.ones(128, device=device_id))
            torch.cuda.synchronize()

    return maybe_force_nccl_backend_init


class GenerationStore(torch.distributed.PrefixStore, StoreMixin):
    """Where the ranks of one generation, and the coordinator, interrupt each other.

    Args:
        base: a client of the job's store.
        generation: the keys of different ones do not meet.
    """

    def __init__(self, base: Any, generation: int) -> None:
        super().__init__(f"generation/{generation}/interruption", base)


def interrupt_in(base: Any) -> Callable[[int, int], None]:
    """What the coordinator interrupts the ranks of a generation by: told the generation, and the rank that is lost.

    Args:
        base: a client of the job's store.
    """

    def interrupt(generation: int, rank: int) -> None:
        GenerationStore(base, generation).record_interrupted([InterruptionRecord(rank, Interruption.TERMINATED)])

    return interrupt
