"""Samples that Prometheus would scrape from an endpoint."""

from __future__ import annotations

import socket
import urllib.request

from prometheus_client.parser import text_string_to_metric_families


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


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
