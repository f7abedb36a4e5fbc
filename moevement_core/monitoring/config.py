"""Flags of the metrics endpoint."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from moevement_core.errors import ConfigError
from moevement_core.util.environment import STORE_ENV
from moevement_core.util.flags import flag

PORT_FLAG, ADDRESS_FLAG = "--moevement-metrics-port", "--moevement-metrics-address"
LOOPBACK = "127.0.0.1"
MOST_PORT = 65535


def port_number(name: str, text: str | None) -> int | None:
    """Return the value of ``--moevement-metrics-port`` as a number; None without the flag.

    Args:
        name: name of the flag, for the error message.
        text: value of the flag.

    Raises:
        ConfigError: the value is not a port number.
    """
    if text is None:
        return None
    if not (text.isdecimal() and 1 <= int(text) <= MOST_PORT):
        raise ConfigError(f"{name} {text}; needs a port, 1 to {MOST_PORT}")
    return int(text)


def _address(name: str, text: str) -> Any:
    if not text.strip():
        raise ConfigError(f"{name} {text!r}; needs an address of this host, such as {LOOPBACK}")
    return text


def unserved(port: str | None) -> str | None:
    """Return the reason why no process serves metrics at ``port``; None if a process does, or if ``port`` is None.

    A rank calls this. Only a launcher or a coordinator serves metrics. The job has one of them if the environment
    of its ranks names a store (STORE_ENV).
    """
    if port is None or STORE_ENV in os.environ:
        return None
    return (
        f"{PORT_FLAG} {port}: no launcher or coordinator runs that could serve metrics; start the ranks with moevement "
        "launch --nproc, give --spares 0 under srun, or leave the flag out"
    )


@dataclass(frozen=True)
class MetricsConfig:
    """Address and port at which a launcher or coordinator serves the metrics of the run."""

    port: int | None = flag(
        PORT_FLAG, metavar="PORT", check=port_number,
        help="port at which the launcher or coordinator serves metrics of the run from --run-dir, in Prometheus's text "
        "format (default: off)",
    )  # fmt: skip
    address: str = flag(
        ADDRESS_FLAG, metavar="ADDRESS", default=LOOPBACK, check=_address,
        help="address at which metrics of the run are served; whoever reaches it can read them "
        f"(default: {LOOPBACK})",
    )  # fmt: skip
