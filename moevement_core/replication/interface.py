"""How much goes over the network of this host, whoever sends it: the counters of its interfaces."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

_INFINIBAND = Path("/sys/class/infiniband")
_WORD = 4
"""Bytes that a counter of an InfiniBand port counts as one."""


def bytes_moved(host: str) -> Callable[[], int] | None:
    """Returns what gives the bytes that came and went so far by the interface of an address and by all InfiniBand
    ports; None where this host does not tell.

    Args:
        host: the address, or a name of it.
    """
    counters = [(path, 1) for path in _of_interface(host)]
    counters += [
        (path, _WORD)
        for name in ("port_xmit_data", "port_rcv_data")
        for path in sorted(_INFINIBAND.glob(f"*/ports/*/counters/{name}"))
    ]
    if not counters or not all(_reads(path) for path, _ in counters):
        return None

    def moved() -> int:
        return sum(int(path.read_text()) * each for path, each in counters)

    return moved


def _of_interface(host: str) -> Sequence[Path]:
    try:
        addresses = {found[4][0] for found in socket.getaddrinfo(host, None)}
    except OSError:
        return ()
    for name, its in psutil.net_if_addrs().items():
        if any(one.address in addresses for one in its):
            folder = Path("/sys/class/net") / name / "statistics"
            return (folder / "tx_bytes", folder / "rx_bytes")
    return ()


def _reads(path: Path) -> bool:
    try:
        int(path.read_text())
    except (OSError, ValueError):
        return False
    return True
