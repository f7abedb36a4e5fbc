"""Addresses: that at which a process meets its job, and that at which other ranks reach this rank."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import psutil

from moevement_core.errors import ConfigError
from moevement_core.util.environment import STORE_ENV

INTERFACE_ENV = "GLOO_SOCKET_IFNAME"
"""Environment variable with the interfaces on which torch's ranks listen; this project uses the first of them."""


def store_address() -> tuple[str, int] | None:
    """Return host and port in :data:`STORE_ENV`; None if the environment names none.

    It is the store of torch's process groups in a rank, and the coordinator in a supervisor.
    """
    if not (address := os.environ.get(STORE_ENV)):
        return None
    return address_of(address)


def address_of(text: str) -> tuple[str, int]:
    """Return the host and the port of an address ``HOST:PORT``."""
    host, _, port = text.rpartition(":")
    return host, int(port)


def own_address(interfaces: Sequence[str] = ()) -> str:
    """Return the address at which this rank accepts connections of other ranks.

    The address belongs to one of ``interfaces`` if there are any, else to the interface in ``GLOO_SOCKET_IFNAME``. If
    that variable is unset, the address belongs to the interface that leads to the job's store.

    Args:
        interfaces: names of interfaces that every node has; ranks of a node use them in turn, by local rank.

    Raises:
        ConfigError: the interface has no address.
    """
    if interfaces:
        interface = interfaces[int(os.environ.get("LOCAL_RANK", "0")) % len(interfaces)]
        return _address_of(interface, f"--moevement-interfaces {interface}")
    if name := os.environ.get(INTERFACE_ENV, "").partition(",")[0]:
        return _address_of(name, f"{INTERFACE_ENV}={name}")
    host, port = store_address() or (
        os.environ.get("MASTER_ADDR", "127.0.0.1"),
        int(os.environ.get("MASTER_PORT", "1")),
    )
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing, but selects the interface
        return str(probe.getsockname()[0])


def _address_of(interface: str, asked: str) -> str:
    addresses = psutil.net_if_addrs().get(interface, ())
    for family in (socket.AF_INET, socket.AF_INET6):
        for address in addresses:
            if address.family == family and not address.address.startswith("fe80"):
                return address.address
    raise ConfigError(
        f"{asked}: this host has no interface of that name with an address; its interfaces are "
        f"{', '.join(sorted(psutil.net_if_addrs()))}"
    )
