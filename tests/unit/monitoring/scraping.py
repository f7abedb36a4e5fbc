"""Samples that Prometheus would scrape from an endpoint."""

from __future__ import annotations

import random
import socket
import urllib.request
from contextlib import suppress

from prometheus_client.parser import text_string_to_metric_families


def free_port() -> int:
    """Return a free port below those that Linux gives to connections, so that nobody else takes it meanwhile."""
    for port in random.sample(range(20_000, 32_000), 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError("100 ports from 20000 to 32000 are in use")


def scraped(url: str) -> dict[str, float]:
    """Return the value of each sample by its name and the value of its label, read by Prometheus's own parser."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        if not answer.headers:
            raise ConnectionResetError("the endpoint ended in the middle of its headers")
        assert answer.headers["Content-Type"].startswith("text/plain")
        text = answer.read().decode()
    return {
        sample.name + "".join(f"/{value}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
