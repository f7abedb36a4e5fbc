"""Clients of the store of torch's process groups (torch's ``TCPStore``).

No rank holds the store, so any rank may die, even rank 0. Only torch's process groups use it. What this project's
processes tell each other are values (:mod:`moevement_core.rendezvous.values`).
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch

from moevement_core.comms.token import Token, own_token
from moevement_core.util.tcp import Endpoint, Ends, connections

TIMEOUT = timedelta(minutes=10)
"""Timeout of operations of torch's store that wait for a value."""


def of_groups(base: Any, token: Token) -> Any:
    """Return a store of process groups whose keys have a prefix that only processes of the job can compute.

    Args:
        base: any ``torch.distributed.Store``.
        token: token of the job.
    """
    return torch.distributed.PrefixStore(f"moevement/{token.mac('prefix').hex()[:32]}/groups", base)


def connect_store(address: tuple[str, int]) -> Any:
    """Return a client of the store for torch's process groups.

    Raises:
        ConfigError: this process has no job token.
    """
    token = own_token()
    return of_groups(torch.distributed.TCPStore(*address, is_master=False, timeout=TIMEOUT), token)


def connect_breakable(address: tuple[str, int]) -> tuple[Any, set[Ends]]:
    """Return a client of the store for torch's process groups, together with its TCP connections.

    A restart shuts down these connections. This ends every wait in the client, while other clients go on.
    """
    before = _to(address[1])
    return connect_store(address), _to(address[1]) - before


def endpoints(address: tuple[str, int]) -> set[Endpoint]:
    """Return every endpoint of the store: each IP address of its host's name, with the port."""
    addresses = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    return {(str(name[0]), int(name[1])) for *_, name in addresses}


def _to(port: int) -> set[Ends]:
    all_ends = (connection.ends for connection in connections())
    return {ends for ends in all_ends if ends.remote is not None and ends.remote[1] == port}
