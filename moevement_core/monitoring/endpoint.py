"""Metrics endpoint beside a job: binds the port, and keeps a process running that answers requests there.

A separate process answers, for two reasons:

- The launcher forks ranks. If a thread of the launcher answered, it might hold a lock at a fork. In the forked rank,
  nothing would ever release that lock.
- A request for metrics must not delay the renewal of a lease.
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
from moevement_core.util.environment import PARENT_ENV

AGAIN_S = 5.0
"""Shortest time in seconds between two starts of the process that answers requests, if it ends or fails to start."""
SERVED = "metrics/served"
"""Key of the value with which tasks pass a :class:`Served` to the coordinator.

Only tasks know the script's flags, which say where to serve metrics.
"""


@dataclass(frozen=True)
class Served:
    """Run directory whose metrics an endpoint serves, and the address and port at which the endpoint listens."""

    run_dir: str
    port: int
    address: str = LOOPBACK

    def encode(self) -> str:
        """Return this object as text."""
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str | bytes) -> Served:
        """Decode a value that :meth:`encode` has returned."""
        return Served(**json.loads(text))


def served_by(run_dir: Path | None, value_of: Callable[[str], str | None]) -> Served | None:
    """Return run directory, address and port of the endpoint that a script's flags ask for; None without an endpoint.

    Args:
        run_dir: run directory of the script.
        value_of: function that returns the value of a flag of the script; None without the flag.

    Raises:
        ConfigError: the port is invalid, or the script has no run directory to read metrics from.
    """
    port, address = port_number(PORT_FLAG, value_of(PORT_FLAG)), value_of(ADDRESS_FLAG) or LOOPBACK
    if port is None:
        return None
    if run_dir is None:
        raise ConfigError(f"{PORT_FLAG} {port} without --run-dir; metrics are read from the run directory: give both")
    return Served(str(run_dir), port, address)


class Endpoint:
    """Metrics endpoint of one job, as a context manager. One thread calls all methods, and no method waits.

    Args:
        served: run directory, address and port of the endpoint.

    Raises:
        ConfigError: the endpoint cannot listen at this address and port.
    """

    def __init__(self, served: Served) -> None:
        self._served = served
        self._listener = _listen(served)
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = -float("inf")

    @property
    def url(self) -> str:
        """URL at which Prometheus gets the metrics."""
        host = f"[{self._served.address}]" if ":" in self._served.address else self._served.address
        return f"http://{host}:{self._served.port}/metrics"

    @property
    def pid(self) -> int | None:
        """Id of the process that answers requests; None before the first :meth:`step`."""
        return self._process.pid if self._process is not None else None

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def step(self, report: Callable[[str], None]) -> None:
        """Start the process that answers requests if none runs; the launcher or coordinator calls this in its loop.

        Args:
            report: function that reports a line of text to the user.
        """
        if self._process is not None and self._process.poll() is None:
            return
        if time.monotonic() < self._started_at + AGAIN_S:
            return
        if self._process is not None:
            report(
                f"the process that serves {self.url} ended with exit code {self._process.returncode}; a new process "
                "is started"
            )
        self._started_at = time.monotonic()
        descriptor = self._listener.fileno()
        self._process = None
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "moevement_core.monitoring.exporter", self._served.run_dir, str(descriptor)],
                pass_fds=[descriptor], stdin=subprocess.DEVNULL, start_new_session=True,  # no Ctrl-C
                env={**os.environ, PARENT_ENV: str(os.getpid())},
            )  # fmt: skip
        except OSError as error:  # The host lacks processes or memory for now. The job continues without the endpoint.
            report(f"no process can be started to serve {self.url}: {error.strerror}; the next attempt follows soon")

    def close(self) -> None:
        """Kill the process that answers requests, and release the port."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._listener.close()


def _listen(served: Served) -> socket.socket:
    family = socket.AF_INET6 if ":" in served.address else socket.AF_INET
    try:
        return socket.create_server((served.address, served.port), family=family)
    except OSError as error:
        why = str(error.strerror).split(" (while")[0]  # The rest repeats the address, which this message has.
        raise ConfigError(
            f"{PORT_FLAG} {served.port}, {ADDRESS_FLAG} {served.address}: {why}; give an address of this "
            "host, and a free port"
        ) from None
