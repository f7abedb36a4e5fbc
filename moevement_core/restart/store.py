"""The store that ranks meet in. The launcher or the coordinator holds it, so that every rank, rank 0 too, may die."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, override

import torch
from nvidia_resiliency_ext.inprocess.attribution import Interruption, InterruptionRecord
from nvidia_resiliency_ext.inprocess.store import StoreMixin

from moevement_core.rendezvous.roster import INTERRUPTED, LEAVING
from moevement_core.rendezvous.signed_store import SignedStore, prefix_of
from moevement_core.rendezvous.token import own_token
from moevement_core.restart.environment import STORE_ENV
from moevement_core.tcp import Endpoint, Ends, connections

TIMEOUT = timedelta(minutes=10)


def store_address() -> tuple[str, int] | None:
    """Return the address of the job's store; None if there is no store."""
    if not (address := os.environ.get(STORE_ENV)):
        return None
    host, port = address.rsplit(":", 1)
    return host, int(port)


def connect(address: tuple[str, int]) -> SignedStore:
    """A client of the job's store.

    Raises:
        ConfigError: this process has no job token.
    """
    return SignedStore(_client(address), own_token())


def connect_plain(address: tuple[str, int]) -> Any:
    """A client of the job's store for torch's process groups, whose values nobody signs.

    Raises:
        ConfigError: this process has no job token.
    """
    return torch.distributed.PrefixStore(f"{prefix_of(own_token())}/groups", _client(address))


def connect_breakable(address: tuple[str, int]) -> tuple[Any, set[Ends]]:
    """The same as :func:`connect_plain`, and its connections.

    Whoever waits in it can be freed by shutting these down, while other clients of the same store go on.
    """
    before = _to(address[1])
    return connect_plain(address), _to(address[1]) - before


def endpoints(address: tuple[str, int]) -> set[Endpoint]:
    """Return the endpoints at which the store may be reached, by every address that its host's name has."""
    found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    return {(str(name[0]), int(name[1])) for *_, name in found}


def _client(address: tuple[str, int]) -> Any:
    return torch.distributed.TCPStore(*address, is_master=False, timeout=TIMEOUT)


def _to(port: int) -> set[Ends]:
    every = (one.ends for one in connections())
    return {ends for ends in every if ends.remote is not None and ends.remote[1] == port}


class GenerationStore(StoreMixin):
    """Store in which the ranks of one generation, and the coordinator, interrupt each other. For one thread.

    Of ``StoreMixin`` what the monitoring thread uses; its own values are not signed, and it would end a rank with an
    exception for one that a stranger has written.

    Args:
        store: the job's.
        generation: the keys of different ones do not meet.
    """

    def __init__(self, store: SignedStore, generation: int) -> None:
        self._store, self._key, self._leaving = store, INTERRUPTED.format(generation), LEAVING.format(generation)

    @override
    def record_interrupted(self, records: Iterable[InterruptionRecord] | None = None) -> None:
        # Whoever is first: several do at once, and what another one wrote would look like a stranger's.
        self._store.claim(self._key, ",".join(f"{one.rank}:{one.interruption.name}" for one in records or ()))

    @override
    def lock_interruption_records(self) -> None:
        """Nothing is added to a record here; the first one stands."""

    @override
    def get_interruption_records(self) -> list[InterruptionRecord]:
        text = (self._store.read(self._key) or b"").decode()
        pairs = [one.split(":", 1) for one in text.split(",") if one]
        return [InterruptionRecord(int(rank), Interruption[name]) for rank, name in pairs]

    def is_interrupted(self) -> bool:
        """Return whether anybody has recorded an interruption; one question to the store, which never waits."""
        return self._store.check([self._key])

    def report_leaving(self, member: int, phase: str) -> None:
        """Let the coordinator know that a member has come to a later phase of leaving; returns at once."""
        self._store.set(f"{self._leaving}/{member}", phase)

    @override
    def wait_for_interrupted(self, timeout: timedelta) -> None:
        self._store.wait([self._key], timeout)


def interrupt_in(store: SignedStore) -> Callable[[int, int], None]:
    """Return the function with which the coordinator interrupts ranks; it takes their generation and the failed rank.

    Args:
        store: the job's.
    """

    def interrupt(generation: int, rank: int) -> None:
        GenerationStore(store, generation).record_interrupted([InterruptionRecord(rank, Interruption.TERMINATED)])

    return interrupt
