"""The commands that start the tasks of each node."""

from __future__ import annotations

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
    command = NodeCommand(["a", "b"], 2, [sys.executable, "-c", _SAY, "{host}", str(tmp_path / "said")])
    tasks = NodeTasks(command, {"STORE": "a:1"}, print)
    tasks.wait_and_kill(60)
    assert sorted((tmp_path / "said").read_text().splitlines()) == ["a 0 4 a:1", "b 2 4 a:1"]
    assert not tasks.are_running
    assert tasks.how_they_ended == "the tasks of a ended with 0; the tasks of b ended with 0"


def _run_until(holds: Callable[[], bool], tasks: NodeTasks, **step: Any) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        tasks.step(step.get("connected", ()), step.get("heard", ()), has_begun=step.get("has_begun", True))
        time.sleep(0.01)


def test_what_ends_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_tasks, "FIRST_DELAY_S", 0.05)
    said: list[str] = []
    starts = tmp_path / "starts"
    script = f"open({str(starts)!r}, 'a').write('+'); raise SystemExit(3)"
    tasks = NodeTasks(_command(["a"], script), {}, said.append)
    _run_until(lambda: starts.exists() and len(starts.read_text()) > 3, tasks)
    tasks.end(60)
    waits = [float(line.split()[-2]) for line in said]
    assert said[0].startswith("the tasks of a ended with 3; started again in ")
    assert waits == sorted(waits), "longer each time where it ends at once"
    assert tasks.failed is None


def test_tasks_that_end_again_and_again_before_the_job_begins_stop_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a node without the program: the others would wait for it, for ever."""
    monkeypatch.setattr(node_tasks, "FIRST_DELAY_S", 0.05)
    script = "import sys, time; sys.argv[1] == 'a' and time.sleep(600); sys.exit(127)"
    tasks = NodeTasks(_command(["a", "b"], script), {}, print)
    _run_until(lambda: tasks.failed is not None, tasks, has_begun=False)
    assert tasks.failed == "the tasks of b ended 3 times with 127 before the job began"
    tasks.end(60)


def test_tasks_that_live_without_their_command_keep_their_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_tasks, "FIRST_DELAY_S", 0.05)
    said: list[str] = []
    tasks = NodeTasks(_command(["a"], "raise SystemExit(9)"), {}, said.append)
    _run_until(lambda: bool(said), tasks, connected=("a/1",), heard=("a/1",))
    time.sleep(0.2)
    tasks.step(("a/1",), ("a/1",), has_begun=True)
    assert not tasks.are_running, "srun was killed alone, and Slurm's daemon runs its tasks on"
    _run_until(lambda: tasks.are_running or len(said) > 1, tasks)
    tasks.end(60)


def test_a_command_whose_tasks_are_gone_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As srun, which waits on when its node was killed and booted again."""
    for name in ("GONE_S", "KILL_S", "FIRST_DELAY_S"):
        monkeypatch.setattr(node_tasks, name, 0.1)
    said: list[str] = []
    deaf = (
        "import pathlib, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        f"pathlib.Path({str(tmp_path)!r}, sys.argv[1]).touch(); time.sleep(600)"
    )
    tasks = NodeTasks(_command(["a", "b"], deaf), {}, said.append)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.iterdir())) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    tasks.step((), (), has_begun=True)
    tasks.step(("a/1", "b/1"), (), has_begun=True)
    _run_until(lambda: len(said) > 1, tasks, connected=("b/1",), heard=("b/1",))
    assert said[0] == "the tasks of a are gone; ending what started them"
    assert said[1].startswith("the tasks of a ended with -9; started again in ")
    assert len(said) == 2
    tasks.wait_and_kill(0)


def test_commands_that_do_not_end_are_ended(tmp_path: Path) -> None:
    tasks = NodeTasks(_command(["a", "b"], "import time; time.sleep(600)"), {}, print)
    assert tasks.are_running
    tasks.end(60)
    assert not tasks.are_running


@pytest.mark.parametrize(
    ("nodes", "per_node", "words", "message"),
    [
        ("", 1, ["srun"], "a command without --nodes; say which nodes it is run for"),
        ("a,,b", 1, ["srun", "{host}"], "--nodes a,,b: needs the names of different nodes"),
        ("a,a", 1, ["srun", "{host}"], "--nodes a,a: needs the names of different nodes"),
        ("a,b", 1, ["srun", "true"], "srun ... has no {host}, so it would start the same tasks 2 times"),
        ("a,b", 0, ["srun", "{host}"], "--tasks-per-node 0: needs 1 or more"),
    ],
)
def test_mistakes(
    nodes: str, per_node: int, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["coordinate", "--ranks", "2", "--nodes", nodes, "--tasks-per-node", str(per_node), "--", *words]
    with pytest.raises(SystemExit, match="2"):
        main(flags)
    assert capsys.readouterr().err.startswith(f"moevement: {message}")


def test_a_job_whose_commands_all_end_before_it_begins_is_stopped(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["coordinate", "--ranks", "2", "--nodes", "a", "--", sys.executable, "-c", "raise SystemExit(7)"]
    assert main(words) == 1
    assert "the job is stopped: the tasks of a ended with 7 before the job did" in capfd.readouterr().err
