"""`moevement launch` as a user runs it: real processes, exit codes, signals, its console."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from moevement_cli.main import main
from moevement_core.run.run_record import RunRecord
from moevement_core.util.lock import acquire
from tests.launching import Launcher, command, finished, launch
from tests.training import SCRIPT, flags
from tests.unit.monitoring.scraping import free_port


@pytest.mark.builds  # two ranks that import for themselves
def test_forked_and_fresh_ranks_are_the_same_run(tmp_path: Path) -> None:
    """Check also that both leave a record and logs of each rank, and print their progress."""
    layout = flags(pipeline_model_parallel_size=2, hidden_dropout=0.1)
    for name, options in (("forked", []), ("fresh", ["--fresh-interpreters"])):
        words = ["--nproc", "2", *options, str(SCRIPT), *layout, "--run-dir", str(tmp_path / name)]
        code, out, err = finished(launch(*words))
        assert (code, err) == (0, "")
        assert "iteration 4/4, loss " in out
        assert re.search(r"\bINFO rank 0: .*\bGPU\b.*--distributed-backend gloo\b", out), out
        assert re.search(r"\bINFO rank 0: .*--data-path\b", out), out
        assert (tmp_path / name / "logs" / "rank_1.out").read_text()
        ranks = json.loads((tmp_path / name / "ranks.json").read_text())
        assert [rank["rank"] for rank in ranks] == [0, 1]
        assert len({rank["pid"] for rank in ranks}) == 2
    assert main(["verify", str(tmp_path / "forked"), str(tmp_path / "fresh"), "--json"]) == 0


@pytest.mark.parametrize("where", ["files", pytest.param("console", marks=pytest.mark.full)])
def test_bad_flags_are_one_line_and_two(where: str, tmp_path: Path) -> None:
    words = flags(num_experts=6, expert_model_parallel_size=4)
    code, _, err = finished(
        launch("--nproc", "4", "--logs", where, str(SCRIPT), *words, "--run-dir", str(tmp_path / "run"))
    )
    assert code == 2
    problem, remedy = r"--num-experts 6\b.*--expert-model-parallel-size 4\b", r"\b4\b.*\b8\b"
    assert re.fullmatch(rf"moevement: {problem}.*{remedy}.*\n", err), err
    job = RunRecord(tmp_path / "run").job()
    assert job is not None
    assert (job.code, job.ranks, job.ended_at is None) == (2, 4, False)
    assert where == "console" or re.fullmatch(f"{problem}.*{remedy}.*", job.reason)


def test_a_run_directory_of_a_job_that_runs_keeps_its_logs(tmp_path: Path) -> None:
    log = tmp_path / "run" / "logs" / "rank_0.out"
    log.parent.mkdir(parents=True)
    log.write_text("written before\n")
    with acquire(tmp_path / "run", "beef", "--run-dir"):
        code, _, err = finished(launch("--nproc", "1", str(SCRIPT), *flags(), "--run-dir", str(tmp_path / "run")))
    assert code == 2
    refused, holder = re.escape(f"--run-dir {tmp_path / 'run'}"), rf"\bbeef\b.*\bpid {os.getpid()}\b"
    assert re.fullmatch(rf"moevement: {refused}\b.*{holder}.*\n", err), err
    assert log.read_text() == "written before\n"
    assert RunRecord(tmp_path / "run").job() is None


def test_what_megatrons_own_configuration_refuses_is_one_line_too(tmp_path: Path) -> None:
    words = flags(moe_router_enable_expert_bias=True, moe_router_score_function="softmax", recompute_granularity="full")
    code, _, err = finished(launch("--nproc", "1", str(SCRIPT), *words, "--run-dir", str(tmp_path / "run")))
    assert code == 2
    assert re.fullmatch(r"moevement: .*\bMegatron\b.*\brecompute_granularity\b.*\n", err), err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--nproc", "2", "no_such_script.py"], r"\bno_such_script\.py\b"),
        (["--nproc", "0", str(SCRIPT)], r"--nproc 0\b.*\b1\b"),
        (["--nproc", "2", "--spares", "-1", str(SCRIPT)], r"--spares -1\b.*\b0\b"),
        (["--nproc", "2", "--spares", "1", str(SCRIPT)], r"--spares\b.*--moevement-sparse-ckpt\b"),
        (["--nproc", "2", "--ranks-per-node", "0", str(SCRIPT)], r"--ranks-per-node 0\b.*\b1\b"),
        ([str(SCRIPT)], r"--nproc\b.*\bsrun\b"),
        (
            ["--nproc", "1", str(SCRIPT), "--config", "none.yaml"],
            rf"--config none\.yaml\b.*{os.strerror(errno.ENOENT)}",
        ),
        (
            ["--nproc", "1", str(SCRIPT), "--run-dir", __file__],
            rf"--run-dir {re.escape(__file__)}\b.*{os.strerror(errno.EEXIST)}",
        ),
    ],
)
def test_what_cannot_be_launched_is_said(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["launch", *words])
    assert caught.value.code == 2
    assert re.search(named, capsys.readouterr().err)


def test_a_rank_that_dies_ends_the_job_and_is_named(tmp_path: Path) -> None:
    words = flags(pipeline_model_parallel_size=2, train_iters=100000)
    process = launch("--nproc", "2", str(SCRIPT), *words, "--run-dir", str(tmp_path))
    pids = _pids_when_training(process, tmp_path)
    os.kill(pids[1], signal.SIGKILL)
    code, _, err = finished(process)
    assert code == 1
    log = re.escape(f"{tmp_path}/logs/rank_1.out")
    assert re.search(rf"\brank 1\b.*\bpid {pids[1]}\b.*\bsignal 9\b.*{log}\b", err), err
    assert not any(psutil.pid_exists(pid) for pid in pids)
    # The record of a killed run has whole lines and no summary.
    assert RunRecord(tmp_path).metrics()
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.parametrize(
    ("nproc", "options"),
    [(2, []), pytest.param(1, ["--fresh-interpreters"], marks=pytest.mark.builds)],
    ids=["forked", "fresh"],
)
def test_a_rank_that_fails_shows_its_traceback(nproc: int, options: list[str], tmp_path: Path) -> None:
    script, last = tmp_path / "script.py", nproc - 1
    script.write_text(
        f"import os\nif os.environ['RANK'] == '{last}':\n    raise KeyError('absent')\nimport time; time.sleep(3600)\n"
    )
    code, _, err = finished(launch("--nproc", str(nproc), *options, str(script), "--run-dir", str(tmp_path / "run")))
    assert code == 1
    assert "KeyError: 'absent'" in err
    assert re.search(rf"\brank {last}\b.*\bpid \d+\b", err), err


@pytest.mark.builds
@pytest.mark.parametrize("victim", [pytest.param("rank", marks=pytest.mark.full), "launcher"])
def test_nothing_is_left_of_a_job_with_checkpoint_writers(victim: str, tmp_path: Path) -> None:
    """Kill a rank, whose writers then have no parent, or press Ctrl-C: neither processes nor files are left."""
    words = flags(
        pipeline_model_parallel_size=2, train_iters=100000, save=str(tmp_path / "c"), save_interval=1, async_save=True,
        use_persistent_ckpt_worker=True, num_workers=1,
    )  # fmt: skip
    scratch = Path(tempfile.mkdtemp(prefix="mt-", dir="/tmp"))  # short: it holds the paths of Unix sockets
    environment = {**os.environ, "TMPDIR": str(scratch)}
    process = command(
        "--nproc",
        "2",
        str(SCRIPT),
        *words,
        "--run-dir",
        str(tmp_path),
        env=environment,
        start_new_session=True,
    )
    pids = _pids_when_training(process, tmp_path)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) > 4
    if victim == "rank":
        os.kill(pids[0], signal.SIGKILL)
    else:
        os.killpg(process.pid, signal.SIGINT)
    code, _, err = finished(process)
    assert code == (1 if victim == "rank" else 130)
    killed = rf"\brank 0\b.*\bpid {pids[0]}\b.*\bsignal 9\b"
    assert re.search(killed, err) if victim == "rank" else re.fullmatch(r"moevement: .*\bCtrl-C\b.*\n", err), err
    assert not [child for child in family if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert list(scratch.iterdir()) == []
    scratch.rmdir()


def _pids_when_training(process: subprocess.Popen[str] | Launcher, run_dir: Path) -> list[int]:
    deadline = time.monotonic() + 120
    record = RunRecord(run_dir)
    while len(record.metrics()) < 2:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return [rank["pid"] for rank in json.loads(record.ranks_path.read_text())]


@pytest.mark.builds
def test_a_task_of_slurm_starts_the_same_way(tmp_path: Path) -> None:
    environment = {
        **os.environ, "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    process = command(str(SCRIPT), *flags(train_iters=2), "--run-dir", str(tmp_path), env=environment)
    code, out, _ = finished(process)
    assert code == 0
    assert "iteration        2/       2" in out
    assert RunRecord(tmp_path).summary()["iterations"] == 2


def test_a_planned_exit_is_no_failure(tmp_path: Path) -> None:
    words = flags(train_iters=10, exit_interval=3, save=str(tmp_path / "c"), save_interval=100)
    code, _, err = finished(launch("--nproc", "1", str(SCRIPT), *words, "--run-dir", str(tmp_path / "run")))
    assert (code, err) == (0, "")
    assert RunRecord(tmp_path / "run").summary()["iterations"] == 3
