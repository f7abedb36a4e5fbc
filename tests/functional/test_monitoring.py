"""Metrics endpoint, TensorBoard, terminal and page show a job that loses a rank."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from moevement_cli.main import main
from moevement_core.run.figures import FIGURES
from moevement_core.run.run_record import RunRecord
from tests.launching import finished, launch, logs
from tests.training import ROOT, SCRIPT, flags
from tests.unit.monitoring.scraping import free_port, scraped

ITERATIONS, KILLED_AFTER = 36, 10
"""Iterations of the job, and those after which rank 1 is killed.

The test counts the latter at the endpoint, so the order of events does not depend on the machine.
"""


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, float]]]:
    """Run a job that loses a rank; return its run directory and the samples scraped while it ran."""
    run_dir, port = tmp_path_factory.mktemp("watched") / "run", free_port()
    words = flags(
        train_iters=ITERATIONS, pipeline_model_parallel_size=2, moevement_sparse_ckpt=True, moevement_window=3,
        moevement_replicas_on_same_node=True, moevement_metrics_port=port,
    )  # fmt: skip
    process = launch("--nproc", "2", "--spares", "1", str(SCRIPT), *words, "--run-dir", str(run_dir))
    url, seen, is_killed = f"http://127.0.0.1:{port}/metrics", list[dict[str, float]](), False
    while process.poll() is None:
        with suppress(OSError):  # before the launcher listens, and when the job has ended
            seen.append(scraped(url))
        if not is_killed and seen and seen[-1].get("moevement_iteration", 0) >= KILLED_AFTER:
            is_killed = True
            ranks = json.loads((run_dir / "ranks.json").read_text(encoding="utf-8"))
            (pid,) = (process["pid"] for process in ranks if process.get("rank") == 1)
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    code, out, err = finished(process)
    assert code == 0, f"{out}\n{err}\n{logs(run_dir)}"
    assert url in out
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=5)
    return run_dir, seen


def test_the_endpoint_outlives_the_rank_that_dies(watched: tuple[Path, list[dict[str, float]]]) -> None:
    _, seen = watched
    iterations = [sample["moevement_iteration"] for sample in seen if "moevement_iteration" in sample]
    assert iterations == sorted(iterations)
    assert min(iterations) < max(iterations)
    assert (seen[0]["moevement_recoveries_total"], seen[-1]["moevement_recoveries_total"]) == (0, 1)
    assert seen[-1]["moevement_last_recovery_seconds/replay"] > 0
    assert seen[-1]["moevement_replicated_bytes_total"] > seen[-1]["moevement_copied_bytes_total"] / 2 > 0
    assert 2 in [sample["moevement_processes/active"] for sample in seen]


def test_tensorboard_has_the_same_figures(watched: tuple[Path, list[dict[str, float]]]) -> None:
    """Check figures that the killed rank wrote and figures that its replacement wrote."""
    run_dir, seen = watched
    written = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    written.Reload()
    tags = set(written.Tags()["scalars"])
    for figure in FIGURES:
        known = figure.exported_name in seen[-1] or any(
            name.startswith(f"{figure.exported_name}/") for name in seen[-1]
        )
        if figure.tag and known:
            assert any(tag == figure.tag or tag.startswith(f"{figure.tag}/") for tag in tags), figure.tag
    losses = {point.step: point.value for point in written.Scalars("moevement/loss")}
    lines = {line["iteration"]: line["loss"] for line in RunRecord(run_dir).metrics()}
    assert losses.keys() >= {1, KILLED_AFTER, ITERATIONS}
    assert all(losses[iteration] == pytest.approx(lines[iteration], rel=1e-6) for iteration in losses)
    assert written.Scalars("moevement/recoveries")[-1].value == 1
    assert "lm loss" in tags, "and what Megatron writes"


def test_what_was_planned_is_not_exceeded_while_nothing_fails(watched: tuple[Path, list[dict[str, float]]]) -> None:
    run_dir, _ = watched
    record = RunRecord(run_dir)
    (plan,) = [event for event in record.events() if event["event"] == "plan"]
    assert (plan["iteration"], plan["window"], plan["strategy"]) == (0, 3, "moevement")
    lines = [line for line in record.metrics() if 3 < line["iteration"] < KILLED_AFTER]
    copied = [line["copied_bytes"] for line in lines]
    assert 0 < sum(copied[:6]) / 6 <= plan["copied_bytes"], "two windows"
    memory = max(line["snapshot_memory_bytes"] + line["log_memory_bytes"] for line in lines)
    assert 0.8 * plan["memory_bytes"] < memory <= plan["memory_bytes"]
    replayed = [event["replayed"] for event in record.events() if event["event"] == "recovery"]
    assert all(count <= plan["most_replayed"] + 2 for count in replayed), "and two more where copies lag"


def test_terminal_and_page_show_it(
    watched: tuple[Path, list[dict[str, float]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, _ = watched
    assert main(["top", str(run_dir), "--once"]) == 0
    frame = capsys.readouterr().out
    assert f"{ITERATIONS}/{ITERATIONS}" in frame
    assert "rank 1 (pid" in frame
    assert main(["report", str(run_dir), "--html", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "rank 1 (pid" in page
    assert 'class="plan"' in page
    assert page.count("<polyline") >= 7


def coordinated(run_dir: Path, port: int, iterations: int) -> subprocess.Popen[str]:
    """Start a coordinator with a job of one rank, in the environment of a Slurm task."""
    command = [sys.executable, "-W", "ignore", "-m", "moevement_cli.main"]
    task = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}
    words = [
        *command, "coordinate", "--ranks", "1", "--run-dir", str(run_dir), "--nodes", "n1", "--",
        *command, "launch", "--trainer", "torch",
        "--spares", "0", str(ROOT / "examples" / "plain_torch" / "train.py"), "--iterations", str(iterations),
        "--moevement-replicas", "0", "--run-dir", str(run_dir), "--moevement-metrics-port", str(port),
    ]  # fmt: skip
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env={**os.environ, **task}
    )


@pytest.mark.builds
def test_over_several_hosts_the_coordinator_has_it_served(tmp_path: Path) -> None:
    port = free_port()
    process, seen = coordinated(tmp_path / "run", port, 100_000), 0.0
    try:
        while seen < 3:
            assert process.poll() is None, process.communicate()[0]
            with suppress(OSError):
                seen = scraped(f"http://127.0.0.1:{port}/metrics").get("moevement_iteration", 0.0)
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)  # the job ends at a boundary
        out, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, out
    assert f"http://127.0.0.1:{port}/metrics" in out
    job = RunRecord(tmp_path / "run").job()
    assert job is not None
    assert (job.code, job.ranks, job.command.split()[:2]) == (0, 1, ["moevement", "coordinate"])


@pytest.mark.full
def test_a_port_that_the_coordinator_cannot_have_stops_the_job_before_it_begins(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = coordinated(tmp_path / "run", port, 100_000)
        try:
            out, _ = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 2
    refused = rf"^moevement: .*--moevement-metrics-port {port}\b.*{os.strerror(errno.EADDRINUSE)}"
    assert re.search(refused, out, re.MULTILINE), out
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    job = RunRecord(tmp_path / "run").job()
    assert job is not None
    assert job.code == 2
    assert f"--moevement-metrics-port {port}" in job.reason
