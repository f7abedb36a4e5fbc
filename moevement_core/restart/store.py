"""The store that ranks meet in. The launcher or the coordinator holds it, so that every rank, rank 0 too, may die."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psutil
import torch
from nvidia_resiliency_ext.inprocess.attribution import Interruption, InterruptionRecord
from nvidia_resiliency_ext.inprocess.store import StoreMixin

from moevement_core.restart.environment import STORE_ENV

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


class GenerationStore(torch.distributed.PrefixStore, StoreMixin):
    """Where the ranks of one generation, and the coordinator, interrupt each other.

    Args:
        base: a client of the job's store.
        generation: the keys of different ones do not meet.
    """

    def __init__(self, base: Any, generation: int) -> None:
        super().__init__(f"generation/{generation}/interruption", base)


def interrupt_in(base: Any) -> Callable[[int, int], None]:
    """What the coordinator interrupts ranks by; called with their generation and the rank that is lost.

    Args:
        base: a client of the job's store.
    """

    def interrupt(generation: int, rank: int) -> None:
        GenerationStore(base, generation).record_interrupted([InterruptionRecord(rank, Interruption.TERMINATED)])

    return interrupt
