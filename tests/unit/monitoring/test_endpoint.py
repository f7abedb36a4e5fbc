"""A process serves the figures of a run in Prometheus's format; the launcher restarts it if it ends."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import time
import urllib.error
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.moevement.preflight.files import metrics_endpoint
from moevement_core.errors import ConfigError
from moevement_core.launching.launch import value_of
from moevement_core.monitoring import endpoint as endpoints
from moevement_core.monitoring.config import unserved
from moevement_core.monitoring.endpoint import Endpoint, Served, served_by
from moevement_core.monitoring.exporter import families
from moevement_core.monitoring.watched_run import WatchedRun
from moevement_core.run.figures import FIGURES, FigureKind
from moevement_core.util.environment import STORE_ENV
from tests.unit.monitoring.runs import append, failure, line, recovered_run
from tests.unit.monitoring.scraping import free_port, scraped


@pytest.fixture
def endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.setattr(endpoints, "AGAIN_S", 0.0)
    with Endpoint(Served(str(tmp_path), free_port())) as serving:
        serving.step(print)
        yield serving


def test_what_is_scraped_is_what_the_record_has_while_it_grows(endpoint: Endpoint, tmp_path: Path) -> None:
    empty = scraped(endpoint.url)
    assert empty["moevement_processes/active"] == 0, "the port answers before there is a record"
    run = recovered_run(tmp_path, has_ended=False)
    has = scraped(endpoint.url)
    assert has["moevement_iteration"] == 10
    assert has["moevement_copied_bytes_total"] == 10_000
    for part, seconds in failure().parts().items():
        assert has[f"moevement_recovery_seconds_total/{part}"] == seconds
    append(run.metrics_path, line(11, "nan"))
    has = scraped(endpoint.url)
    assert (has["moevement_iteration"], str(has["moevement_loss"])) == (11, "nan")


def test_every_figure_has_its_name_help_and_kind(tmp_path: Path) -> None:
    recovered_run(tmp_path)
    run = WatchedRun(tmp_path)
    run.update()
    exported = {family.name: family for family in families(run.samples())}
    for figure in FIGURES:
        if figure.name == "expert_imbalance":  # only elastic jobs have it
            continue
        family = exported[f"moevement_{figure.name}"]
        assert (family.documentation, family.type) == (figure.help, str(figure.kind))
        names = {sample.name for sample in family.samples}
        assert names == {f"moevement_{figure.name}{'_total' if figure.kind is FigureKind.COUNTER else ''}"}


def test_a_process_that_ends_is_followed_by_another(endpoint: Endpoint) -> None:
    reports: list[str] = []
    assert scraped(endpoint.url)
    assert endpoint.pid is not None
    before = endpoint.pid
    os.kill(before, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while endpoint.pid == before:
        endpoint.step(reports.append)
        assert time.monotonic() < deadline
    assert scraped(endpoint.url)
    (text,) = reports
    assert re.search(rf"{re.escape(endpoint.url)}.*-{int(signal.SIGKILL)}\b", text)


def test_a_client_that_says_nothing_keeps_nobody_waiting(endpoint: Endpoint) -> None:
    host, port = endpoint.url.removeprefix("http://").removesuffix("/metrics").split(":")
    with socket.create_connection((host, int(port))) as silent:
        silent.send(b"GET /met")
        assert scraped(endpoint.url)


def test_a_damaged_record_is_an_error_to_who_asks_and_not_the_end(endpoint: Endpoint, tmp_path: Path) -> None:
    run = recovered_run(tmp_path, has_ended=False)
    whole = run.metrics_path.read_text()
    run.metrics_path.write_text(whole + "damaged\n")
    with pytest.raises(urllib.error.HTTPError, match="500"):
        scraped(endpoint.url)
    run.metrics_path.unlink()
    run.metrics_path.write_text(whole)
    assert scraped(endpoint.url)["moevement_iteration"] == 10


def test_it_listens_on_loopback_unless_asked_otherwise() -> None:
    def asked(*words: str) -> Served | None:
        return served_by(Path("/run"), lambda flag: value_of(["script.py", *words], flag))

    assert asked() is None
    assert asked("--moevement-metrics-port", "9400") == Served("/run", 9400, "127.0.0.1")
    other = asked("--moevement-metrics-port=9400", "--moevement-metrics-address", "0.0.0.0")
    assert other == Served("/run", 9400, "0.0.0.0")
    assert other is not None
    assert Served.decode(other.encode()) == other


@pytest.mark.parametrize("port", ["0", "65536", "-1", "http", ""])
def test_what_is_no_port_is_refused(port: str) -> None:
    with pytest.raises(ConfigError, match=rf"--moevement-metrics-port {port}\W.*\b1\b.*\b65535\b"):
        served_by(Path("/run"), {"--moevement-metrics-port": port}.get)


def test_figures_need_a_record() -> None:
    with pytest.raises(ConfigError, match=r"--moevement-metrics-port 9400\b.*--run-dir\b"):
        served_by(None, {"--moevement-metrics-port": "9400"}.get)


def test_where_nothing_outlives_the_ranks_the_flag_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a script that no launcher of this project has started, as under srun without spares."""
    monkeypatch.setenv(STORE_ENV, "127.0.0.1:1")
    assert unserved("9400") is None
    monkeypatch.delenv(STORE_ENV)
    assert unserved(None) is None
    complaint = unserved("9400")
    assert complaint is not None
    assert re.search(r"^--moevement-metrics-port 9400\b.*--nproc\b.*--spares 0\b", complaint)
    assert complaint in list(metrics_endpoint(Namespace(moevement_metrics_port="9400")))


def test_a_port_that_somebody_has_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--moevement-metrics-port {port}\b.*{os.strerror(errno.EADDRINUSE)}"):
            Endpoint(Served("/run", port))


def test_a_server_that_cannot_be_started_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "AGAIN_S", 0.0)
    reported = list[str]()
    with Endpoint(Served(str(tmp_path), free_port())) as serving:
        with monkeypatch.context() as none_left:
            none_left.setattr(endpoints.subprocess, "Popen", _no_process)
            serving.step(reported.append)
            serving.step(reported.append)
        assert len(reported) == 2
        assert os.strerror(errno.EAGAIN) in reported[0]
        serving.step(reported.append)
        assert scraped(serving.url)["moevement_processes/active"] == 0


def _no_process(*_: object, **__: object) -> None:
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
