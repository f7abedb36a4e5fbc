"""Clients of the job's store (torch's ``TCPStore``). No rank holds the store, so any rank may die, even rank 0."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, override

import torch
from nvidia_resiliency_ext.inprocess.attribution import Interruption, InterruptionRecord
from nvidia_resiliency_ext.inprocess.store import StoreMixin

from moevement_core.comms.token import own_token
from moevement_core.rendezvous.roster import INTERRUPTED, LEAVING
from moevement_core.rendezvous.signed_store import SignedStore
from moevement_core.util.tcp import Endpoint, Ends, connections

TIMEOUT = timedelta(minutes=10)
"""Timeout of operations of torch's store that wait for a value."""


def connect(address: tuple[str, int]) -> SignedStore:
    """Return a client of the job's store that signs what it writes, and ignores values without a valid signature.

    Raises:
        ConfigError: this process has no job token.
    """
    return SignedStore(_client(address), own_token())


def connect_plain(address: tuple[str, int]) -> Any:
    """Return a client of the job's store that does not sign values, because torch's process groups cannot.

    Raises:
        ConfigError: this process has no job token.
    """
    return connect(address).of_groups


def connect_breakable(address: tuple[str, int]) -> tuple[Any, set[Ends]]:
    """Return a client that does not sign values, together with its TCP connections.

    A restart shuts down these connections. This ends every wait in the client, while other clients go on.
    """
    before = _to(address[1])
    return connect_plain(address), _to(address[1]) - before


def endpoints(address: tuple[str, int]) -> set[Endpoint]:
    """Return every endpoint of the store: each IP address of its host's name, with the port."""
    addresses = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    return {(str(name[0]), int(name[1])) for *_, name in addresses}


def _client(address: tuple[str, int]) -> Any:
    return torch.distributed.TCPStore(*address, is_master=False, timeout=TIMEOUT)


def _to(port: int) -> set[Ends]:
    all_ends = (connection.ends for connection in connections())
    return {ends for ends in all_ends if ends.remote is not None and ends.remote[1] == port}


class GenerationStore(StoreMixin):
    """Store in which a rank or the coordinator records that a generation is interrupted. One thread calls all methods.

    The thread of nvidia-resiliency-ext that watches a rank reads the record. The class replaces the methods of that
    library's ``StoreMixin`` which this thread uses. The original methods do not sign values, and would end a rank with
    an exception if a process without the job's token wrote a value.

    Args:
        store: store of the job.
        generation: number of the generation; each generation has its own keys.
    """

    def __init__(self, store: SignedStore, generation: int) -> None:
        self._store, self._key, self._leaving = store, INTERRUPTED.format(generation), LEAVING.format(generation)

    @override
    def record_interrupted(self, records: Iterable[InterruptionRecord] | None = None) -> None:
        # Several processes may record at once, and the first claim stands. An append would break the signature.
        self._store.claim(self._key, ",".join(f"{record.rank}:{record.interruption.name}" for record in records or ()))

    @override
    def lock_interruption_records(self) -> None:
        """Do nothing: later records cannot change the first record, so it needs no lock."""

    @override
    def get_interruption_records(self) -> list[InterruptionRecord]:
        text = (self._store.read(self._key) or b"").decode()
        pairs = [item.split(":", 1) for item in text.split(",") if item]
        return [InterruptionRecord(int(rank), Interruption[name]) for rank, name in pairs]

    def is_interrupted(self) -> bool:
        """Return True if an interruption is recorded; the call is one request to the store, and never waits."""
        return self._store.check([self._key])

    def report_leaving(self, member: int, phase: str) -> None:
        """Report to the coordinator the phase that a member has reached in leaving its generation; return at once."""
        self._store.set(f"{self._leaving}/{member}", phase)

    @override
    def wait_for_interrupted(self, timeout: timedelta) -> None:
        self._store.wait([self._key], timeout)


def interrupt_in(store: SignedStore) -> Callable[[int, int], None]:
    """Return a function that interrupts all ranks of a generation; the coordinator calls it.

    The arguments of the function are the generation and the failed rank.

    Args:
        store: store of the job.
    """

    def interrupt(generation: int, rank: int) -> None:
        GenerationStore(store, generation).record_interrupted([InterruptionRecord(rank, Interruption.TERMINATED)])

    return interrupt
