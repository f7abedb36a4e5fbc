"""List, runner and page of ``python -m benchmarks.gpu``; these tests do not judge what its checks find."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks.gpu import shared
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.catalogue import CHECKS, ONE_DEVICE_S
from benchmarks.gpu.check import Check, Form, Status, function_of
from benchmarks.gpu.kept import RESULTS, kept_page
from benchmarks.gpu.page import REHEARSAL, page
from benchmarks.gpu.runner import Result, is_answered, result_of, run, why_not
from moevement_core import device
from moevement_core.util.environment import MEMBER_ENV
from tests.training import ROOT
from tests.unit import gpu_bodies

MACHINE = {"devices": "0", "GPUs": "none", "torch": torch.__version__}
LONG_S = 300.0


def check(body: str, limit_s: float = LONG_S, number: str = "E1") -> Check:
    text = f"The body {body} does what it does."
    return Check(number, body, text, "docs/gpu.md", f"{gpu_bodies.__name__}:{body}", limit_s, has_cpu_form=True)


def test_the_list_is_complete() -> None:
    numbers = [f"E{number}" for number in range(1, 21)] + [f"M{number}" for number in range(1, 11)]
    assert [check.number for check in CHECKS] == numbers
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    for entry in CHECKS:
        assert entry.claim.endswith("."), entry.name
        assert (ROOT / entry.page).is_file(), entry.name
        assert 0 < entry.limit_s <= 600, entry.name
        assert entry.devices == 1 if entry.number[0] == "E" else entry.devices > 1, entry.name
    assert sum(entry.limit_s for entry in CHECKS if entry.number[0] == "E") <= ONE_DEVICE_S


def test_every_body_is_there() -> None:
    for entry in CHECKS:
        assert callable(function_of(entry.body)), entry.name


@pytest.mark.builds
def test_every_outcome_is_kept_and_harms_no_other_check(tmp_path: Path) -> None:
    bodies = {
        "crashes": Status.CRASHED, "raises": Status.CRASHED, "lacks_a_package": Status.NOT_RUN,
        "is_not_for_here": Status.NOT_RUN, "fails": Status.FAILED, "measures": Status.FIGURE, "holds": Status.PASSED,
    }  # fmt: skip
    results = list(run([check(body) for body in bodies], tmp_path, MACHINE))
    assert {result.name: result.status for result in results} == bodies
    by_name = {result.name: result for result in results}
    assert list(by_name["holds"].figures) == [["rate", "12.35", "GB/s"]]
    assert [values for _, *values in by_name["crashes"].figures] == [["1", ""]]
    assert by_name["raises"].claims
    assert "a_package_that_is_not_there" in by_name["lacks_a_package"].why
    for result in results:
        read = result_of(tmp_path, check(result.name))
        assert read is not None
        assert (read.status, read.form, list(read.claims)) == (result.status, Form.CPU, list(result.claims))


def test_a_check_that_hangs_is_ended(tmp_path: Path) -> None:
    (result,) = run([check("hangs", 2.0)], tmp_path, MACHINE)
    assert result.status is Status.TIMED_OUT
    assert result.took_s >= 2.0
    assert not [process for process in psutil.Process().children(recursive=True) if "gpu_bodies" in _words(process)]


def _words(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


@pytest.mark.builds
def test_a_call_that_is_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    """Kill a call in the middle of a check; check that the process of the check ends and that the next call resumes."""
    program = (
        "from pathlib import Path; import sys; from benchmarks.gpu.runner import run\n"
        "from tests.unit.benchmarks.test_gpu_checks import MACHINE, check\n"
        "list(run([check('holds'), check('blocks'), check('measures')], Path(sys.argv[1]), MACHINE))\n"
    )
    environment = {**os.environ, gpu_bodies.FOLDER_ENV: str(tmp_path), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, env=environment) as process:
        started = tmp_path / "started"
        _wait_until(lambda: started.exists() and started.read_text(), process)
        blocked = int(started.read_text())
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    _wait_until(lambda: not psutil.pid_exists(blocked) or psutil.Process(blocked).status() == psutil.STATUS_ZOMBIE)
    names = ("holds", "blocks", "measures")
    first, *others = [result_of(tmp_path, check(name)) for name in names]
    assert first is not None
    assert others == [None, None]
    (tmp_path / "release").touch()
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, env=environment, check=True)
    again = [result_of(tmp_path, check(name)) for name in names]
    assert again[0] == first
    assert [result.status for result in again if result] == [Status.PASSED, Status.PASSED, Status.FIGURE]


def _wait_until(holds: object, process: subprocess.Popen[bytes] | None = None) -> None:
    assert callable(holds)
    deadline = time.monotonic() + LONG_S
    while not holds():
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None
        time.sleep(0.05)


@pytest.mark.builds
def test_a_check_is_run_again_if_asked_or_if_it_had_no_answer(tmp_path: Path) -> None:
    checks = [check("measures"), check("is_not_for_here")]
    assert [result.name for result in run(checks, tmp_path, MACHINE)] == ["measures", "is_not_for_here"]
    assert [result.name for result in run(checks, tmp_path, MACHINE)] == ["is_not_for_here"]
    assert [result.name for result in run(checks[:1], tmp_path, MACHINE, again=True)] == ["measures"]
    (tmp_path / "measures.json").write_text('{"number": "E1"')  # cut off by a full disk, for example
    assert [result.name for result in run(checks[:1], tmp_path, MACHINE)] == ["measures"]


def test_a_rehearsal_is_no_answer_for_a_gpu() -> None:
    result = Result("E1", "copy", Status.PASSED, Form.CPU)
    assert is_answered(result, Form.CPU)
    assert not is_answered(result, Form.GPU)


@pytest.mark.parametrize(
    ("devices", "can_share", "form"),
    [(0, True, Form.CPU), (1, True, Form.SHARED), (1, False, Form.GPU), (2, True, Form.GPU)],
)
def test_ranks_share_the_only_gpu(devices: int, can_share: bool, form: Form) -> None:
    several = Check("M1", "several", "It is so.", "docs/gpu.md", "m:f", 1, devices=2, can_share=can_share)
    assert several.form(devices) is form
    assert (why_not(several, form, devices) is None) is (form is Form.SHARED or devices == 2)
    alone = Check("E1", "alone", "It is so.", "docs/gpu.md", "m:f", 1, can_share=can_share)
    assert alone.form(1) is Form.GPU


def test_the_page_says_which_ranks_shared_a_gpu() -> None:
    several = Check("M1", "several", "It is so.", "docs/gpu.md", "m:f", 1, devices=2, can_share=True)
    result = Result("M1", "several", Status.PASSED, Form.SHARED, claims=[["it is", True]])
    text = page([several], {"several": result}, {"devices": "1", "GPUs": "1 x a card"}, "command")
    (row,) = [line for line in text.splitlines() if line.startswith("| M1 ")]
    outcome = row.split("|")[4]
    assert "passed" in outcome
    assert "one GPU" in outcome


def test_each_process_on_a_shared_gpu_has_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_identity", lambda number: f"GPU-{number}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name in ("NCCL_HOSTID", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "another")  # restored after the test
    monkeypatch.setenv(MEMBER_ENV, "3")
    shared.share_device()
    assert device.visible_devices() == ("GPU-0/member-3",)
    assert (os.environ["NCCL_HOSTID"], os.environ["LOCAL_RANK"]) == ("member-3", "0")


@pytest.mark.parametrize(("form", "devices", "runs"), [(Form.GPU, 1, False), (Form.GPU, 2, True), (Form.CPU, 0, False)])
def test_why_a_check_does_not_run(form: Form, devices: int, runs: bool) -> None:
    several = Check("M1", "several", "It is so.", "docs/gpu.md", "m:f", 1, devices=2)
    assert (why_not(several, form, devices) is None) is runs


def test_the_page_is_made_from_results() -> None:
    checks = [check(name, number=f"E{place + 1}") for place, name in enumerate(("holds", "fails", "hangs", "measures"))]
    gpu = {**MACHINE, "devices": "1", "GPUs": "1 x a card"}
    results = {
        "holds": Result(
            "E1", "holds", Status.PASSED, Form.GPU, figures=[["a | bar", "1", "ms"]], claims=[["it is", True]],
            machine=gpu,
        ),
        "fails": Result("E2", "fails", Status.FAILED, Form.GPU, claims=[["it is", True], ["it was", False]]),
        "hangs": Result("E3", "hangs", Status.TIMED_OUT, Form.CPU, why="did not end in 2 s"),
    }  # fmt: skip
    text = page(checks, results, gpu, "python -m benchmarks.gpu")
    rows = {line.split()[1]: line for line in text.splitlines() if line.startswith("| E")}
    assert rows.keys() == {"E1", "E2", "E3", "E4"}
    assert "| passed |" in rows["E1"]
    assert str(Status.FAILED) in rows["E2"]
    assert "rehearsed" in rows["E3"]
    assert "not run" in rows["E4"]
    assert r"| a \| bar | 1 | ms |" in text
    assert gpu["GPUs"] in text
    assert REHEARSAL not in text
    assert REHEARSAL in page(checks, {}, MACHINE, "python -m benchmarks.gpu")


@pytest.mark.parametrize(
    "words",
    [
        ["--only", "nothing"], ["--only"], ["--limit", "0"], ["--limit", "nan"], ["--limit", "inf"], ["--limit", "x"],
        ["--out", "/proc/nothing"], ["--out", __file__], ["more"],
    ],
)  # fmt: skip
def test_bad_input_gets_a_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_the_list_is_printed_and_chosen_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [entry.number for entry in CHECKS]
    assert main(["--list", "--only", "M", "redo", "E1"]) == 0
    chosen = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert chosen == ["E1", "E19", *(f"M{number}" for number in range(1, 11))]


REPRESENTATIVES = ["E4", "E6", "E16", "M9"]
"""Check of each form: one that needs a GPU, processes that end, interpreted kernels, figures of several ranks."""


@pytest.mark.builds
@pytest.mark.slow("each check starts interpreters of its own")
@pytest.mark.parametrize(
    "chosen",
    [REPRESENTATIVES, pytest.param([entry.number for entry in CHECKS], marks=pytest.mark.full)],
    ids=["representatives", "all"],
)
def test_what_a_cpu_can_run_runs(chosen: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(tmp_path), "--limit", "600", "--only", *chosen]
    ended = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, check=False
    )
    results = {name: Result(**read) for name, read in json.loads((tmp_path / "gpu.json").read_text()).items()}
    checks = [entry for entry in CHECKS if entry.number in chosen]
    assert results.keys() == {entry.name for entry in checks}, ended.stdout + ended.stderr
    for entry in checks:
        result = results[entry.name]
        wanted = {Status.PASSED, Status.FIGURE} if entry.has_cpu_form else {Status.NOT_RUN}
        assert result.status in wanted, (result, ended.stderr)
        assert result.form == Form.CPU
    assert (tmp_path / "gpu.md").read_text().count(REHEARSAL) == 1


def test_the_kept_page_is_that_of_the_kept_results() -> None:
    page_now = RESULTS.with_suffix(".md").read_text(encoding="utf-8")
    assert page_now == kept_page(RESULTS), "python -m benchmarks.gpu.kept writes it"
