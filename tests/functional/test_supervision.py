"""Stopped processes are replaced, and jobs whose launcher is killed or asked to end leave no process behind."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from moevement_cli.main import main
from moevement_core.launching.children import END_SIGNALS, Child, Program, end_all
from moevement_core.run.run_record import RunRecord
from tests.failure_free import digest_of, failure_free
from tests.launching import finished, launch, logs, survive
from tests.training import SCRIPT, flags

FLAGS: dict[str, Any] = {
    "moevement_sparse_ckpt": True, "moevement_window": 3, "moevement_replicas": 1, "pipeline_model_parallel_size": 2,
    "moevement_replicas_on_same_node": True,
}  # fmt: skip


class Job:
    """Running job of two ranks and a spare."""

    def __init__(self, run_dir: Path, **overrides: Any) -> None:
        words = flags(**FLAGS | overrides)
        self.record = RunRecord(run_dir)
        self.process = launch("--nproc", "2", "--spares", "1", str(SCRIPT), *words, "--run-dir", str(run_dir))

    def until(self, holds: Callable[[], bool], timeout_s: float = 150.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not holds():
            assert self.process.poll() is None, f"{self.process.communicate()}\n{logs(self.record.folder)}"
            assert time.monotonic() < deadline, logs(self.record.folder)
            time.sleep(0.1)

    def until_iteration(self, iteration: int) -> None:
        self.until(lambda: (self.record.newest_metric() or {"iteration": 0})["iteration"] >= iteration)

    def pids(self, role: str) -> list[int]:
        path = self.record.ranks_path
        return (
            [entry["pid"] for entry in json.loads(path.read_text()) if entry["role"] == role] if path.exists() else []
        )


def _are_gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


@pytest.mark.full
def test_a_spare_that_is_stopped_is_replaced_and_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    job = Job(tmp_path / "run", train_iters=100000, moevement_lease_seconds=2)
    job.until_iteration(2)
    job.until(lambda: len(job.pids("spare")) == 1)
    (stopped,) = job.pids("spare")
    os.kill(stopped, signal.SIGSTOP)
    job.until(lambda: len(job.pids("spare")) == 1 and job.pids("spare") != [stopped])
    assert _are_gone([stopped])
    assert not [event for event in job.record.events() if event["event"] == "failure"], "nobody was interrupted"
    all_pids = [*job.pids("active"), *job.pids("spare")]
    assert len(all_pids) == 3
    job.process.kill()
    job.process.wait()
    deadline = time.monotonic() + 120
    while not _are_gone(all_pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _are_gone(all_pids), "ranks must not train on without their launcher"
    job.process.communicate()


@pytest.mark.full
def test_what_a_killed_rank_had_started_is_ended(tmp_path: Path) -> None:
    dense = {"save": tmp_path / "dense", "save_interval": 3}
    job = Job(tmp_path / "run", train_iters=100000, moevement_lease_seconds=2, **dense)
    job.until_iteration(4)
    killed = next(psutil.Process(pid) for pid in job.pids("active") if psutil.Process(pid).children())
    left = [child.pid for child in killed.children(recursive=True)]
    killed.kill()
    job.until_iteration(8)
    job.until(lambda: _are_gone(left))
    job.process.send_signal(signal.SIGTERM)
    code, out, err = finished(job.process)
    assert code == 0, f"{out}\n{err}\n{logs(job.record.folder)}"


@pytest.mark.full
def test_a_job_that_is_asked_to_end_saves_and_goes_on_later_with_the_same_bits(tmp_path: Path) -> None:
    windows: dict[str, Any] = {
        "moevement_persist_dir": str(tmp_path / "windows"),
        "moevement_load": str(tmp_path / "windows"),
    }
    iterations = 24
    wanted = failure_free(2, **FLAGS, train_iters=iterations)
    # Data workers of a job with Megatron's own handler ignore the signal and would outlive their ranks.
    job = Job(tmp_path / "run", **windows, train_iters=iterations, exit_signal_handler=True, num_workers=1)
    job.until_iteration(8)
    os.kill(job.process.pid, signal.SIGTERM)
    code, out, err = finished(job.process)
    assert code == 0, f"{out}\n{err}"
    assert re.search(r"^moevement: .*\bSIGTERM\b", out, re.MULTILINE), out
    stopped_at = job.record.summary()["iterations"]
    assert 8 <= stopped_at < iterations
    newest = max(int(path.stem.split("_")[1]) for path in (tmp_path / "windows").glob("window_*.json"))
    assert newest > stopped_at - 3 * FLAGS["moevement_window"], "the last window is on disk"
    survived = survive(2, 1, tmp_path / "run", **FLAGS, **windows, train_iters=iterations)
    assert survived.digest == digest_of(wanted)
    survived.check_metrics(iterations)
    assert main(["verify", str(wanted.folder), str(tmp_path / "run"), "--json"]) == 0


@pytest.mark.full
def test_a_rank_that_is_stopped_during_a_recovery_is_replaced(tmp_path: Path) -> None:
    """Stop a rank while the other rank waits for it to form process groups, then while it replays."""
    wanted = failure_free(2, **FLAGS, train_iters=14)
    survived = survive(
        2, 1, tmp_path / "run",
        inject=(
            "rank=1,iteration=8,phase=forward", "rank=1,phase=groups,signal=STOP", "rank=1,phase=replay,signal=STOP",
        ),
        **FLAGS, train_iters=14, moevement_lease_seconds=2,
    )  # fmt: skip
    assert survived.digest == digest_of(wanted)
    survived.check_metrics(14)
    assert re.search(r"\blease\b", survived.failures()[-1]["noticed_by"])


def test_a_replacement_that_is_killed_while_communicators_are_made_holds_up_nobody(tmp_path: Path) -> None:
    """Kill the replacement while the other rank waits for it in the first collective of a group."""
    survived = survive(
        2, 1, tmp_path / "run", inject=("rank=1,iteration=8,phase=forward", "rank=1,phase=communicators"),
        **FLAGS, train_iters=14,
    )  # fmt: skip
    assert survived.digest == digest_of(failure_free(2, **FLAGS, train_iters=14))
    survived.check_metrics(14)
    (failure,) = survived.failures()
    assert len(failure["earlier"]) == 1
    assert set(failure["leaving"]) == {"shut_down", "drain", "abort", "unwind", "collect"}
    assert failure["free_bytes"] > 0


@pytest.mark.full
def test_a_batch_that_always_kills_its_rank_ends_the_job_and_is_named(tmp_path: Path) -> None:
    words = flags(**FLAGS, train_iters=14)
    for _ in range(5):
        words += ["--moevement-inject", "rank=1,iteration=6,phase=forward"]
    code, _, err = finished(
        launch("--nproc", "2", "--spares", "1", str(SCRIPT), *words, "--run-dir", str(tmp_path / "run"))
    )
    assert code == 1
    named = r"\brank 1\b.*\b5 times\b.*\biteration 6\b.*--iterations-to-skip 6\b"
    assert re.search(rf"^moevement: .*{named}", err, re.MULTILINE), err


@pytest.mark.slow("a rank is given up after three leases")
def test_a_rank_that_no_abort_frees_says_where_it_is_before_it_is_given_up(tmp_path: Path) -> None:
    script = tmp_path / "stuck.py"
    script.write_text(STUCK.format(script=str(SCRIPT), stuck=str(tmp_path / "stuck"), raised=str(tmp_path / "raised")))
    flags_ = FLAGS | {"train_iters": 10, "num_layers": 2, "moevement_lease_seconds": 1}
    survived = survive(2, 1, tmp_path / "run", script=script, **flags_)
    survived.check_metrics(10)
    assert survived.digest == digest_of(failure_free(2, **flags_))
    text = (tmp_path / "run" / "logs" / "rank_1.err").read_text()
    assert re.search(r"File .*\bstuck\.py\b.*\bstay\b", text), text


STUCK = """
import os
from itertools import count
import sys
import time

import torch
from megatron.training import get_args

sys.argv[0] = {script!r}
source = open({script!r}).read()
exec(compile(source.replace('if __name__ == "__main__":', "if False:"), {script!r}, "exec"), globals())

original_forward_step, micro_batch = forward_step, count()


def stay():
    open({stuck!r}, "w").close()
    time.sleep(600)


def fail_when_the_other_rank_stays():
    while not os.path.exists({stuck!r}):
        time.sleep(0.01)
    open({raised!r}, "w").close()
    raise RuntimeError("a failure of rank 0")


def forward_step(data_iterator, model):
    if get_args().curr_iteration == 5 and not os.path.exists({raised!r}):
        if torch.distributed.get_rank() == 1:
            stay()
        elif next(micro_batch) == 1:  # the first one has reached the other rank
            fail_when_the_other_rank_stays()
    return original_forward_step(data_iterator, model)


main()
"""


def test_a_rank_ignores_what_its_launcher_answers(tmp_path: Path) -> None:
    """Send a rank each signal that asks a job to end; it must live to reach the boundary at which the job saves."""
    ready = tmp_path / "ready"
    child = Child("child", Program(_sleep, (str(ready),)), {}, None)
    try:
        while not ready.exists():
            time.sleep(0.01)
        for number in END_SIGNALS:
            os.kill(child.pid, number)
        time.sleep(0.2)
        assert child.poll() is None
    finally:
        end_all([child])
    assert (child.code, child.was_ended) == (-signal.SIGKILL, True)


def _sleep(ready: str) -> None:
    Path(ready).touch()
    time.sleep(3600)


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_other_warnings_end_a_job_in_order_too(number: signal.Signals, tmp_path: Path) -> None:
    job = Job(tmp_path / "run", train_iters=100000)
    job.until_iteration(4)
    all_pids = [*job.pids("active"), *job.pids("spare")]
    os.kill(job.process.pid, number)
    code, _, err = finished(job.process)
    assert (code, err) == (0, "")
    assert _are_gone(all_pids)
