"""Clients of the store of torch's process groups (torch's ``TCPStore``).

No rank holds the store, so any rank may die, even rank 0. Only torch's process groups use it. What this project's
processes tell each other are values (:mod:`moevement_core.rendezvous.values`).
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from moevement_core.comms.address import address_of
from moevement_core.comms.token import Token, own_token
from moevement_core.rendezvous.roster import INTERRUPTED, STORE
from moevement_core.rendezvous.values import JobValues, number_of
from moevement_core.util.tcp import Endpoint, Ends, connections

TIMEOUT = timedelta(minutes=10)
"""Timeout of operations of torch's store that wait for a value."""
CONNECT = timedelta(seconds=5)
"""Time after which an attempt to connect to the store begins anew, perhaps with the store of another coordinator."""


def of_groups(base: Any, token: Token) -> Any:
    """Return a store of process groups whose keys have a prefix that only processes of the job can compute.

    Args:
        base: any ``torch.distributed.Store``.
        token: token of the job.
    """
    return torch.distributed.PrefixStore(f"moevement/{token.mac('prefix').hex()[:32]}/groups", base)


def connect_store(address: tuple[str, int], timeout: timedelta = TIMEOUT) -> Any:
    """Return a client of the store for torch's process groups.

    Raises:
        ConfigError: this process has no job token.
        DistNetworkError: the store cannot be reached within ``timeout``.
    """
    token = own_token()
    store = torch.distributed.TCPStore(*address, is_master=False, timeout=timeout)
    store.set_timeout(TIMEOUT)
    return of_groups(store, token)


@dataclass(frozen=True)
class GenerationGroups:
    """Client of the store for the process groups of one generation."""

    store: Any
    connections: set[Ends]
    """TCP connections of the client. A restart shuts them down. This ends every wait in the client, while other clients
    go on."""
    endpoints: set[Endpoint]
    """Every endpoint of the store."""


def connect_to_groups(values: JobValues, generation: int) -> GenerationGroups | None:
    """Connect to the store for the process groups of a generation.

    A store is lost with its coordinator, and the next coordinator has another one.

    Returns:
        The client; None if the generation is interrupted while its store cannot be reached.

    Raises:
        ConfigError: this process has no job token.
    """
    while True:
        address = address_of(values.read(STORE) or "")
        before = _to(address[1])
        try:
            store = connect_store(address, timeout=CONNECT)
        except dist.DistError:
            if number_of(values.read(INTERRUPTED)) >= generation:
                return None
            continue
        return GenerationGroups(store, _to(address[1]) - before, endpoints(address))


def endpoints(address: tuple[str, int]) -> set[Endpoint]:
    """Return every endpoint of the store: each IP address of its host's name, with the port."""
    addresses = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    return {(str(name[0]), int(name[1])) for *_, name in addresses}


def _to(port: int) -> set[Ends]:
    all_ends = (connection.ends for connection in connections())
    return {ends for ends in all_ends if ends.remote is not None and ends.remote[1] == port}
