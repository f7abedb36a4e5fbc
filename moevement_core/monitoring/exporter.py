"""Process that serves a run's metrics to Prometheus; ``endpoint.py`` starts it beside a job.

The process reads only the run directory. So it serves metrics even if ranks are dead, and cannot delay the launcher.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from socketserver import ThreadingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moevement_core.monitoring.watched_run import WatchedRun
from moevement_core.run.figures import Figure, FigureKind, FigureSample
from moevement_core.util.parent import end_with_parent

REQUEST_TIMEOUT_S = 10.0
"""Seconds that a client may take to send its request, because a thread of the server waits for each request."""


class RunCollector(Collector):
    """Source of a run's metrics for ``prometheus_client``; it reads new lines of the run record at each request.

    Several threads may call it.
    """

    def __init__(self, run: WatchedRun) -> None:
        self._run = run
        self._lock = threading.Lock()

    def collect(self) -> Iterable[Metric]:
        """Read the new lines of the run record, and return the current values of all known metrics."""
        with self._lock:
            self._run.update()
            return list(families(self._run.samples()))


def families(samples: Iterable[FigureSample]) -> Iterator[Metric]:
    """Yield metrics in the form of ``prometheus_client``.

    Args:
        samples: values of metrics; all values of one metric must follow each other.
    """
    for figure, values in groupby(samples, key=lambda sample: sample.figure):
        family = _family(figure)
        for sample in values:
            family.add_metric([] if sample.label is None else [sample.label], sample.value)
        yield family


def _family(figure: Figure) -> CounterMetricFamily | GaugeMetricFamily:
    kind = CounterMetricFamily if figure.kind is FigureKind.COUNTER else GaugeMetricFamily
    return kind(f"moevement_{figure.name}", figure.help, labels=[figure.label] if figure.label else None)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_TIMEOUT_S

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing, because Prometheus sends a request every few seconds."""


def serve(folder: Path, listener: socket.socket) -> None:
    """Answer Prometheus's requests until this process is killed.

    Args:
        folder: run directory.
        listener: bound socket that listens.
    """
    registry = CollectorRegistry()
    registry.register(RunCollector(WatchedRun(folder)))
    host, port = listener.getsockname()[:2]
    with _Server((host, port), _Handler, bind_and_activate=False) as server:
        server.socket.close()
        server.socket = listener
        server.server_name, server.server_port = host, port
        server.setup_environ()
        server.set_app(make_wsgi_app(registry))
        server.serve_forever()


if __name__ == "__main__":
    end_with_parent()
    serve(Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])))
