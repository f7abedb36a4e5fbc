"""Has the figures of a run served, beside a job: binds the port, and keeps the process going that answers there.

The process is another one because the launcher forks ranks, and a thread that answered here might hold a lock that a
fork would never see released; and because nothing that asks for figures may delay a lease.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from moevement_core.errors import ConfigError
from moevement_core.monitoring.config import ADDRESS_FLAG, LOOPBACK, PORT_FLAG, port_number
from moevement_core.restart.environment import PARENT_ENV

AGAIN_S = 5.0
"""How long after its start the process is started again, should it have ended."""
SERVED = "metrics/served"
"""In the job's store: a :class:`Served`, of flags that tasks know and the coordinator does not."""


@dataclass(frozen=True)
class Served:
    """What is served, and where."""

    run_dir: str
    port: int
    address: str = LOOPBACK

    def encode(self) -> str:
        """As it stands in the store."""
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str | bytes) -> Served:
        """The inverse of :meth:`encode`."""
        return Served(**json.loads(text))


def served_by(run_dir: Path | None, value_of: Callable[[str], str | None]) -> Served | None:
    """What a script's flags say; None where they ask for nothing.

    Args:
        run_dir: the script's.
        value_of: gives the value of a flag of it.

    Raises:
        ConfigError: it is no port, or there is no run directory to read from.
    """
    port, address = port_number(PORT_FLAG, value_of(PORT_FLAG)), value_of(ADDRESS_FLAG) or LOOPBACK
    if port is None:
        return None
    if run_dir is None:
        raise ConfigError(f"{PORT_FLAG} {port} without --run-dir; figures are read from there, give both")
    return Served(str(run_dir), port, address)


class Endpoint:
    """For one job; closed at the end of a ``with`` block. All methods are for one thread, and none of them waits.

    Args:
        served: what, and where.

    Raises:
        ConfigError: nothing can listen there.
    """

    def __init__(self, served: Served) -> None:
        self._served = served
        self._listener = _listen(served)
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = -float("inf")

    @property
    def url(self) -> str:
        """Where to ask."""
        host = f"[{self._served.address}]" if ":" in self._served.address else self._served.address
        return f"http://{host}:{self._served.port}/metrics"

    @property
    def pid(self) -> int | None:
        """Of the process that answers; None before the first :meth:`step`."""
        return self._process.pid if self._process is not None else None

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def step(self, report: Callable[[str], None]) -> None:
        """Start the process that answers, where there is none; to be called often.

        Args:
            report: called with what an operator should know.
        """
        if self._process is not None and self._process.poll() is None:
            return
        if time.monotonic() < self._started_at + AGAIN_S:
            return
        if self._process is not None:
            report(f"what serves {self.url} ended with {self._process.returncode}; started again")
        self._started_at = time.monotonic()
        descriptor = self._listener.fileno()
        self._process = None
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "moevement_core.monitoring.exporter", self._served.run_dir, str(descriptor)],
                pass_fds=[descriptor], stdin=subprocess.DEVNULL, start_new_session=True,  # Ctrl-C is for the launcher
                env={**os.environ, PARENT_ENV: str(os.getpid())},
            )  # fmt: skip
        except OSError as error:  # no process or memory is to be had now; the job goes on without figures
            report(f"what serves {self.url} cannot be started: {error.strerror}; tried again")

    def close(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._listener.close()


def _listen(served: Served) -> socket.socket:
    family = socket.AF_INET6 if ":" in served.address else socket.AF_INET
    try:
        return socket.create_server((served.address, served.port), family=family)
    except OSError as error:
        why = str(error.strerror).split(" (while")[0]  # the address follows, which the line has already
        raise ConfigError(
            f"{PORT_FLAG} {served.port}, {ADDRESS_FLAG} {served.address}: {why}; give an address of this "
            "host, and a free port"
        ) from None
