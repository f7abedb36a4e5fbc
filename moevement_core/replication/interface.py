"""Byte counters of this host's network interfaces. They count the traffic of all processes on the host."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import psutil

_INFINIBAND = Path("/sys/class/infiniband")
_WORD = 4
"""Bytes in one unit of an InfiniBand port's data counter."""


def bytes_moved(host: str) -> Callable[[], int] | None:
    """Return a function that reads how many bytes this host has sent and received; None if it has no counter.

    The function returns the sum over the interface with the address of ``host`` and all InfiniBand ports.

    Args:
        host: address of the interface, or a host name for it.
    """
    interface = _interface(host)
    ports = [
        path
        for name in ("port_xmit_data", "port_rcv_data")
        for path in sorted(_INFINIBAND.glob(f"*/ports/*/counters/{name}"))
        if _reads(path)
    ]

    def moved() -> int:
        # psutil counts the process's own network namespace; files of sysfs may belong to another one.
        counters = psutil.net_io_counters(pernic=True).get(interface) if interface else None
        by_ports = sum(int(path.read_text()) for path in ports) * _WORD
        return by_ports + (counters.bytes_sent + counters.bytes_recv if counters is not None else 0)

    is_counted = bool(ports) or interface in psutil.net_io_counters(pernic=True)
    return moved if is_counted else None


def _interface(host: str) -> str | None:
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return None
    interfaces = psutil.net_if_addrs().items()
    return next(
        (name for name, addresses_ in interfaces if any(address.address in addresses for address in addresses_)), None
    )


def _reads(path: Path) -> bool:
    try:
        int(path.read_text())
    except (OSError, ValueError):
        return False
    return True
