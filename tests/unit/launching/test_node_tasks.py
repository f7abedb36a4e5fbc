"""Commands that start the tasks of each node: their restarts, ends and mistakes."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moevement_cli.main import main
from moevement_core.launching import node_tasks
from moevement_core.launching.node_tasks import NodeCommand, NodeTasks


def _command(nodes: list[str], script: str, tasks: int = 2) -> NodeCommand:
    return NodeCommand(nodes, tasks, [sys.executable, "-c", script, "{host}"])


_SAY = """
import os, sys
its = [os.environ[name] for name in ("MOEVEMENT_FIRST_TASK", "MOEVEMENT_TASKS", "STORE")]
open(sys.argv[2], "a").write(" ".join([sys.argv[1], *its]) + "\\n")
"""


def test_each_node_gets_its_command_and_the_numbers_of_its_tasks(tmp_path: Path) -> None:
    command = NodeCommand(["n1", "n2"], 2, [sys.executable, "-c", _SAY, "{host}", str(tmp_path / "said")])
    tasks = NodeTasks(command, {"STORE": "a:1"}, print)
    tasks.wait_and_kill(60)
    assert sorted((tmp_path / "said").read_text().splitlines()) == ["n1 0 4 a:1", "n2 2 4 a:1"]
    assert not tasks.are_running
    assert re.fullmatch(r"\D*\bn1\b\D*\b0\b\D*\bn2\b\D*\b0\b\D*", tasks.how_they_ended)


def _run_until(holds: Callable[[], bool], tasks: NodeTasks, **step: Any) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        tasks.step(step.get("connected", ()), step.get("heard", ()), has_begun=step.get("has_begun", True))
        time.sleep(0.01)


def test_what_ends_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_tasks, "FIRST_DELAY_S", 0.05)
    reports: list[str] = []
    starts = tmp_path / "starts"
    script = f"open({str(starts)!r}, 'a').write('+'); raise SystemExit(3)"
    tasks = NodeTasks(_command(["n1"], script), {}, reports.append)
    _run_until(lambda: starts.exists() and len(starts.read_text()) > 3, tasks)
    tasks.end(60)
    assert all(re.search(r"\bn1\b\D*\b3\b.*\b\d+ s\b", line) for line in reports)
    assert tasks._nodes[0]._delay_s == pytest.approx(0.05 * 2 ** len(reports)), "longer each time where it ends at once"
    assert tasks.failed is None


def test_tasks_that_end_again_and_again_before_the_job_begins_stop_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a node whose tasks end at once, as if it lacks the program. Other nodes would wait for it forever."""
    monkeypatch.setattr(node_tasks, "FIRST_DELAY_S", 0.05)
    script = "import sys, time; sys.argv[1] == 'n1' and time.sleep(600); sys.exit(127)"
    tasks = NodeTasks(_command(["n1", "n2"], script), {}, print)
    _run_until(lambda: tasks.failed is not None, tasks, has_begun=False)
    assert re.search(r"\bn2\b\D*\b3\b\D*\b127\b", tasks.failed or "")
    tasks.end(60)


def test_tasks_that_live_without_their_command_keep_their_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_tasks, "FIRST_DELAY_S", 0.05)
    reports: list[str] = []
    tasks = NodeTasks(_command(["a"], "raise SystemExit(9)"), {}, reports.append)
    _run_until(lambda: bool(reports), tasks, connected=("a/1",), heard=("a/1",))
    time.sleep(0.2)
    tasks.step(("a/1",), ("a/1",), has_begun=True)
    assert not tasks.are_running, "srun was killed alone, and Slurm's daemon runs its tasks on"
    _run_until(lambda: tasks.are_running or len(reports) > 1, tasks)
    tasks.end(60)


def test_a_command_whose_tasks_are_gone_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a command that outlives its tasks, as srun does when its node was killed and has booted again."""
    for name in ("GONE_S", "KILL_S", "FIRST_DELAY_S"):
        monkeypatch.setattr(node_tasks, name, 0.1)
    reports: list[str] = []
    deaf = (
        "import pathlib, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        f"pathlib.Path({str(tmp_path)!r}, sys.argv[1]).touch(); time.sleep(600)"
    )
    tasks = NodeTasks(_command(["n1", "n2"], deaf), {}, reports.append)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.iterdir())) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    tasks.step((), (), has_begun=True)
    tasks.step(("n1/1", "n2/1"), (), has_begun=True)
    _run_until(lambda: len(reports) > 1, tasks, connected=("n2/1",), heard=("n2/1",))
    assert re.fullmatch(r"\D*\bn1\b\D*", reports[0]), "no exit code yet"
    assert re.search(r"\bn1\b.* -9\b", reports[1])
    assert len(reports) == 2
    tasks.wait_and_kill(0)


def test_commands_that_do_not_end_are_ended(tmp_path: Path) -> None:
    tasks = NodeTasks(_command(["a", "b"], "import time; time.sleep(600)"), {}, print)
    assert tasks.are_running
    tasks.end(60)
    assert not tasks.are_running


@pytest.mark.parametrize(
    ("nodes", "per_node", "words", "pattern"),
    [
        ("", 1, ["srun"], r"--nodes\b(?! a,)"),
        ("a,,b", 1, ["srun", "{host}"], r"--nodes a,,b\b"),
        ("a,a", 1, ["srun", "{host}"], r"--nodes a,a\b"),
        ("a,b", 1, ["srun", "true"], r"\bsrun\b.*\{host\}.*\b2\b"),
        ("a,b", 0, ["srun", "{host}"], r"--tasks-per-node 0\b.*\b1\b"),
    ],
)
def test_mistakes(
    nodes: str, per_node: int, words: list[str], pattern: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["coordinate", "--ranks", "2", "--nodes", nodes, "--tasks-per-node", str(per_node), "--", *words]
    with pytest.raises(SystemExit, match="2"):
        main(flags)
    assert re.match(f"moevement: .*{pattern}", capsys.readouterr().err)


def test_a_job_whose_commands_all_end_before_it_begins_is_stopped(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["coordinate", "--ranks", "2", "--nodes", "n1", "--", sys.executable, "-c", "raise SystemExit(7)"]
    assert main(words) == 1
    assert re.search(r"^moevement: .*\bn1\b\D*\b7\b", capfd.readouterr().err, flags=re.MULTILINE)
