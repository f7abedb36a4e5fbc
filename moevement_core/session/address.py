"""By which address other ranks reach this host."""

from __future__ import annotations

import os
import socket

import psutil

from moevement_core.errors import ConfigError
from moevement_core.restart.store import store_address

INTERFACE_ENV = "GLOO_SOCKET_IFNAME"
"""What torch has ranks listen on; we do likewise."""


def own_address() -> str:
    """Of the interface that ``GLOO_SOCKET_IFNAME`` names, if it does; otherwise of the one that leads to the store.

    Raises:
        ConfigError: the interface has no address.
    """
    if name := os.environ.get(INTERFACE_ENV, "").partition(",")[0]:
        return _address_of(name)
    host, port = store_address() or (
        os.environ.get("MASTER_ADDR", "127.0.0.1"),
        int(os.environ.get("MASTER_PORT", "1")),
    )
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing, and finds the way
        return str(probe.getsockname()[0])


def _address_of(interface: str) -> str:
    addresses = psutil.net_if_addrs().get(interface, ())
    for family in (socket.AF_INET, socket.AF_INET6):
        for one in addresses:
            if one.family == family and not one.address.startswith("fe80"):
                return one.address
    raise ConfigError(
        f"{INTERFACE_ENV}={interface}: this host has no such interface with an address; it has "
        f"{', '.join(sorted(psutil.net_if_addrs()))}"
    )
