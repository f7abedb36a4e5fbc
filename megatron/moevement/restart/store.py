"""The store that ranks meet in. The launcher holds it, so that every rank, rank 0 too, may die."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
from nvidia_resiliency_ext.inprocess.attribution import Interruption, InterruptionRecord
from nvidia_resiliency_ext.inprocess.store import PrefixStore, StoreMixin

from megatron.moevement.restart.environment import STORE_ENV
from moevement_core.rendezvous.coordinator import Wrapper

TIMEOUT = timedelta(minutes=10)


def store_address() -> tuple[str, int] | None:
    """Where the launcher's store is, if there is one."""
    if not (address := os.environ.get(STORE_ENV)):
        return None
    host, port = address.rsplit(":", 1)
    return host, int(port)


def connect(address: tuple[str, int]) -> Any:
    """A client of the launcher's store."""
    return torch.distributed.TCPStore(*address, is_master=False, timeout=TIMEOUT)


def meet_in_launcher_store(original: Callable[..., Any]) -> Callable[..., Any]:
    """``pretrain`` that initialises torch.distributed through the launcher's store, where there is one."""

    @functools.wraps(original)
    def pretrain(*args: Any, store: Any = None, **kwargs: Any) -> Any:
        if store is None and (address := store_address()):
            store = connect(address)
        return original(*args, store=store, **kwargs)

    return pretrain


class GenerationStore(torch.distributed.PrefixStore, StoreMixin):
    """What the restart wrapper of one generation keeps in the launcher's store.

    Args:
        address: of the launcher's store.
        generation: the keys of different ones do not meet.
        base: a client that is there already.
    """

    def __init__(self, address: tuple[str, int], generation: int, base: Any = None) -> None:
        super().__init__(f"generation/{generation}/inprocess", base if base is not None else connect(address))


class InProcessWrapper(Wrapper):
    """The restart wrapper of nvidia-resiliency-ext, as the coordinator knows it.

    Args:
        base: a client of the store.
        address: where the store is.
        world: ranks of the job.
    """

    def __init__(self, base: Any, address: tuple[str, int], world: int) -> None:
        self._base, self._address, self._world = base, address, world

    def _iteration(self, generation: int) -> Any:
        """A wrapper is left after every failure, so it has one iteration."""
        return PrefixStore(0, GenerationStore(self._address, generation, self._base))

    def lost(self, generation: int) -> Iterable[int]:
        """Ranks whose monitors, or those of others, have recorded that they ended."""
        now = self._iteration(generation)
        return now.get_terminated_ranks() if now.check([now.TERMINATED_RANKS]) else ()

    def stand_in_for(self, generation: int, rank: int) -> None:
        """What a rank's own monitor does too, where it still lives; everything here may be done twice."""
        store = GenerationStore(self._address, generation, self._base)
        arrived = f"{store.BARRIER_PREFIX}:barrier:{store.INITIAL_BARRIER}:arrived"
        store.append(arrived, "")
        if str(rank) not in store.get(arrived).decode().split(","):
            store.initial_barrier(ranks=[rank], rendezvous_count=self._world, timeout=timedelta(0))
        now = self._iteration(generation)
        now.record_interrupted([InterruptionRecord(rank, Interruption.TERMINATED)])
        now.record_terminated_ranks([rank])
        now.iteration_barrier(ranks=[rank], rendezvous_count=self._world, timeout=timedelta(0))
