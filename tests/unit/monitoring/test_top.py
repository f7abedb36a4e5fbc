"""``moevement top`` shows the present state of a run, in a terminal and elsewhere."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from moevement_cli.frame import Frame, ranges
from moevement_cli.main import main
from moevement_cli.run_state import RunCondition, left_s, state_of
from moevement_core.monitoring.watched_run import WatchedRun
from moevement_core.overhead.fields import FIELDS
from moevement_core.run.events import Started
from moevement_core.run.figures import RANKS
from moevement_core.util.exit_codes import HUNG_UP
from moevement_core.util.process_identity import machine_id, start_of
from tests.unit.monitoring.runs import BEGAN_AT, append, failure, job, line, recovered_run

NOW = BEGAN_AT + 20.0


def shown(folder: Path, width: int = 80) -> str:
    console = Console(width=width, no_color=True)
    with console.capture() as captured:
        console.print(Frame(watching(folder), NOW))
    return captured.get()


def watching(folder: Path) -> WatchedRun:
    watched = WatchedRun(folder)
    watched.update()
    return watched


def values_of(text: str, first: str) -> dict[str, str]:
    """Return the values of a row by their names in the row above, which begins with ``first``."""
    rows = text.splitlines()
    at = next(number for number, row in enumerate(rows) if row.startswith(first))
    starts = [
        place for place, letter in enumerate(rows[at])
        if letter != " " and (place == 0 or rows[at][place - 2 : place] == "  ")
    ]  # fmt: skip
    ends = [*starts[1:], None]
    return {rows[at][a:b].strip(): rows[at + 1][a:b].strip() for a, b in zip(starts, ends, strict=True)}


def test_a_frame_has_what_the_record_has_in_eighty_columns(tmp_path: Path) -> None:
    recovered_run(tmp_path, has_ended=False)
    text = shown(tmp_path)
    assert max(map(len, text.splitlines())) <= 80
    training = values_of(text, "iteration")
    assert training == {
        "iteration": "10/10", "loss": "2.0000", "grad norm": "1.500", "iter. time": "1.000 s", "tokens/s": "512",
        "ETTR": "62.5%", "recoveries": "1",
    }  # fmt: skip
    checkpoints = {**values_of(text, "window"), **values_of(text, "on disk")}
    assert checkpoints == {
        "window": "3 iterations", "restore point": "iteration 3", "peers behind": "1 iteration", "unsent copies": "2",
        "snapshots": "4.0 MB", "log": "1.0 MB", "on disk": "to 5, 7.0 kB",
    }  # fmt: skip
    assert values_of(text, "saving costs") == {
        "saving costs": "2.0% of training", "95% interval": "1.0% to 3.0%", "allowed": "2.5%", "copies": "0.4%",
        "digests": "0.3%", "sends": "1.0%", "policy": "0.1%", "stalls": "0.2%",
    }  # fmt: skip
    assert values_of(text, "clock").keys() == {"clock", "up", "last iteration", "time left"}
    assert (values_of(text, "clock")["up"], values_of(text, "clock")["last iteration"]) == ("23 s", "4 s ago")
    assert re.search(r"\bn0: 0-1\b", text)
    assert re.search(r"\bn1: 2-3\b\D*\b1\b", text)
    (reason,) = failure().failures
    assert re.search(rf"\brecovery 1\b.*\b10 s\b.*\b4\.00 s\b.*{re.escape(reason)}", text)
    for part, seconds in failure().parts().items():
        assert f" {part} {seconds:.2f}" in text


@pytest.mark.parametrize("has_ended", [False, True])
def test_before_anything_is_measured_it_says_so(tmp_path: Path, *, has_ended: bool) -> None:
    run = recovered_run(tmp_path, has_ended=has_ended)
    append(run.metrics_path, {name: value for name, value in line(11).items() if name not in FIELDS})
    (value,) = values_of(shown(tmp_path), "saving costs").values()
    assert value.split() == ["not", "measured", *(() if has_ended else ("yet",))]


def test_the_bar_of_a_recovery_is_as_long_as_its_parts(tmp_path: Path) -> None:
    recovered_run(tmp_path)
    bar = shown(tmp_path).splitlines()[-1]
    assert [bar.count(shade) for shade in "█▓▒░▚▄"] == [9, 4, 4, 18, 9, 27]  # of 72, for 0.5, 0.25, 0.25, 1, 0.5, 1.5


def test_a_part_that_took_any_time_is_seen(tmp_path: Path) -> None:
    run = recovered_run(tmp_path, has_ended=False)
    at = BEGAN_AT + 5.5
    run.event(failure(2, interrupted_at=at + 0.001, left_at=at + 0.002, formed_at=at + 0.002, usable_at=at + 0.003))
    for width in (80, 60, 30):
        text = shown(tmp_path, width)
        bar = next(row for row in text.splitlines() if row.strip().startswith("█▓▒"))
        assert 2 < len(bar) <= width
        assert all(re.search(rf"{shade} \w", text) for shade in "█▓▒░▚▄"), "each swatch stays with its word"


@pytest.mark.parametrize("width", [100, 60, 40])
def test_no_word_is_cut(width: int, tmp_path: Path) -> None:
    recovered_run(tmp_path / "run", has_ended=False)
    text = shown(tmp_path / "run", width)
    assert max(map(len, text.splitlines())) <= width
    assert re.search(r"\biteration\b.*\bloss\b", text)
    assert all(re.search(rf"\b{name}\b", text) for name in ("recoveries", "tokens/s", "unsent copies", "on disk"))
    (reason,) = failure().failures
    assert reason in " ".join(text.split())
    assert text.splitlines()[0].split("  ")[0].endswith("/run"), "the end of its path tells runs apart"


def test_a_large_job_fits_the_terminal(tmp_path: Path) -> None:
    """Check a job of 32 nodes with eight ranks each, a node of spares, and ten further failures."""
    run = recovered_run(tmp_path / "run", has_ended=False)
    for generation in range(2, 12):
        run.event(failure(generation))
    processes: list[dict[str, Any]] = [
        {"rank": rank, "pid": rank, "host": f"node{rank // 8:02}", "role": "active"} for rank in range(256)
    ]
    processes += [{"rank": None, "pid": 300 + n, "host": "node32", "role": "spare"} for n in range(8)]
    run.write_ranks(processes)
    run.event(Started(10, 256))
    frame = Frame(watching(tmp_path / "run"), NOW, "q: quit")
    whole = "\n".join(line.plain for line in frame.lines(100))
    assert all(f"node{number:02}: {8 * number}-{8 * number + 7}" in whole for number in range(32))
    assert re.search(r"\bnode32: \D*\b8\b", whole)
    for width, height in ((200, 50), (100, 30), (80, 24), (60, 16), (60, 5)):
        lines = [line.plain for line in frame.lines(width, height)]
        assert len(lines) <= height
        assert max(map(len, lines)) <= width
        assert "run" in lines[0]
        assert lines[-1] == "q: quit"
        if height >= 24:
            text = "\n".join(lines)
            assert "recovery 11," in text
            assert "node00: 0-7" in text
            assert "node31: 248-255" in text or width < 100


def test_the_newest_recoveries_are_shown(tmp_path: Path) -> None:
    run = recovered_run(tmp_path, has_ended=False)
    for generation in range(2, 9):
        run.event(failure(generation))
    text = shown(tmp_path)
    assert [number for number in range(1, 9) if f"recovery {number}," in text] == [4, 5, 6, 7, 8]


def test_a_run_without_sparse_checkpoints_says_so(tmp_path: Path) -> None:
    run = recovered_run(tmp_path)
    run.metrics_path.write_text(json.dumps({"iteration": 1, "loss": "nan", "time": BEGAN_AT}) + "\n")
    run.events_path.unlink()
    text = shown(tmp_path)
    assert not re.search(r"^window\b", text, re.MULTILINE)
    training = values_of(text, "iteration")
    assert (training["loss"], training["recoveries"]) == ("nan", "0")


@pytest.mark.parametrize(
    ("ranks", "after_s", "kind", "text"),
    [
        (4, 5.0, RunCondition.TRAINING, r"training"),
        (4, 500.0, RunCondition.SILENT, r"\D+\b8 min"),
        (3, 5.0, RunCondition.RECOVERING, r"recovering\b\D+\b1\D+\b4 ranks\b\D*"),
        (3, 60.0, RunCondition.RECOVERING, r"recovering\b\D+\b1\D+\b4 ranks\b\D*\b60 s"),
    ],
)
def test_the_state_of_a_run_that_goes_on(
    tmp_path: Path, ranks: int, after_s: float, kind: RunCondition, text: str
) -> None:
    run = recovered_run(tmp_path, has_ended=False)
    run.write_ranks([{"rank": rank, "pid": rank, "host": "h", "role": "active"} for rank in range(ranks)])
    state = state_of(watching(tmp_path), BEGAN_AT + 16.0 + after_s)
    assert state.kind is kind
    assert re.fullmatch(text, state.text)
    assert ("missing ranks: 3" in shown(tmp_path)) == (ranks == 3)


def test_a_run_that_has_just_begun_and_one_of_an_older_version(tmp_path: Path) -> None:
    (tmp_path / "new" / "logs").mkdir(parents=True)
    assert main(["top", str(tmp_path / "new"), "--once"]) == 0
    assert state_of(watching(tmp_path / "new"), NOW).kind is RunCondition.STARTING
    recovered_run(tmp_path / "old").job_path.unlink()
    assert state_of(watching(tmp_path / "old"), NOW).kind is RunCondition.ENDED


@pytest.mark.parametrize(
    ("ended", "has_trained", "kind", "pattern"),
    [
        (
            {"code": 2, "reason": "--lr 0: needs more\nlast"},
            False,
            RunCondition.REFUSED,
            r"\b5 s\b.*: --lr 0: needs more$",
        ),
        (
            {"code": 1, "reason": "rank 2 was killed"},
            True,
            RunCondition.FAILED,
            r"\bcode 1\b.*\b5 s\b.*: rank 2 was killed$",
        ),
        ({"code": 143, "reason": "stopped by SIGTERM"}, True, RunCondition.FAILED, r"\b143\b.*: stopped by SIGTERM$"),
        ({"code": 0}, True, RunCondition.ENDED, r"^ended\b.*\b5 s ago\b[^,]*, at [\d:]+$"),
    ],
)
def test_how_a_run_ended_is_said(
    ended: dict[str, Any], has_trained: bool, kind: RunCondition, pattern: str, tmp_path: Path
) -> None:
    run = recovered_run(tmp_path, has_ended=False)
    if not has_trained:
        run.metrics_path.unlink()
    run.write_job(job(ended_at=NOW - 5.0, **ended))
    state = state_of(watching(tmp_path), NOW)
    assert state.kind is kind
    assert re.search(pattern, state.text)
    assert "up" not in values_of(shown(tmp_path), "clock")


def test_a_run_that_was_asked_to_end_early_says_where(tmp_path: Path) -> None:
    run = recovered_run(tmp_path, has_ended=False)
    run.write_job(job(ended_at=NOW, code=0))
    run.metrics_path.write_text("".join(run.metrics_path.read_text().splitlines(keepends=True)[:7]))
    assert re.search(r"\biteration 7$", state_of(watching(tmp_path), NOW).text)


def test_a_run_whose_launcher_was_killed_is_no_running_one(tmp_path: Path) -> None:
    run = recovered_run(tmp_path, has_ended=False)
    run.write_job(job(machine=machine_id(), pid=os.getpid(), started="0"))
    watched = watching(tmp_path)
    assert (watched.has_ended, state_of(watched, NOW).kind) == (True, RunCondition.KILLED)
    run.write_job(job(machine=machine_id(), pid=os.getpid(), started=start_of(os.getpid())))
    assert state_of(watching(tmp_path), NOW).kind is RunCondition.TRAINING


def test_the_time_left_counts_failures_as_so_far(tmp_path: Path) -> None:
    run = recovered_run(tmp_path, has_ended=False)
    assert left_s(watching(tmp_path)) == 0
    run.config_path.write_text("train_iters: 110")
    assert left_s(watching(tmp_path)) == pytest.approx(100 * 1.0 / 0.625)
    assert values_of(shown(tmp_path), "clock")["time left"] == "2 min"


def test_where_the_output_is_no_terminal_there_is_one_frame(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recovered_run(tmp_path, has_ended=False)
    assert main(["top", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("grad norm") == 1


def test_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recovered_run(tmp_path)
    assert main(["top", str(tmp_path), "--json"]) == 0
    has: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert has["state"] == "ended"
    assert has["figures"]["moevement_iteration"] == 10
    shares = {field: has["figures"][f"moevement_{field}_ratio"] for field in FIELDS}
    assert shares == {field: line(10)[field] for field in FIELDS}
    assert has["figures"]["moevement_processes"] == {"active": 4, "spare": 1}
    assert has["nodes"][1] == {"node": "n1", "ranks": [2, 3], "spares": 1, "starting": 0}
    assert has["job"]["code"] == 0


def test_spares_that_start_are_not_those_that_are_ready(tmp_path: Path) -> None:
    run = recovered_run(tmp_path, has_ended=False)
    ranks = [{"rank": 0, "pid": 1, "host": "a", "role": "active"}]
    run.write_ranks([*ranks, {"rank": None, "pid": None, "host": "a", "node": "a", "role": "starting"}])
    assert re.search(r"\bspares\D*\b0 ready, 1 starting\b", shown(tmp_path))
    figures = {sample.label: sample.value for sample in watching(tmp_path).samples() if sample.figure is RANKS}
    assert figures == {"active": 1, "spare": 0}


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        (["{}/none"], r"{}/none\b.*--run-dir\b"),
        (["{}"], r"{}\b[^/].*--run-dir\b"),
        (["{}", "--interval", "0"], r"--interval 0\b.*\b0\b"),
        (["{}", "--interval", "nan"], r"--interval nan\b.*\b0\b"),
        (["{}", "--often"], r"--often\b.*--help\b"),
    ],
)
def test_what_cannot_be_shown_is_one_line_and_two(
    words: list[str], pattern: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["top", *(word.format(tmp_path) for word in words)])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert re.fullmatch(f"moevement: .*{pattern.format(re.escape(str(tmp_path)))}.*\n", error), error


def test_a_damaged_record_is_one_line_and_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = recovered_run(tmp_path)
    run.metrics_path.write_text("damaged\n")
    with pytest.raises(SystemExit) as caught:
        main(["top", str(tmp_path)])
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_ranks_in_a_row_are_a_range() -> None:
    assert list(ranges([5, 0, 1, 2, 7, 8])) == ["0-2", "5", "7-8"]


class Terminal:
    """Pseudo-terminal in which ``moevement top`` runs."""

    def __init__(self, folder: Path, *, has_keyboard: bool = True) -> None:
        self.keyboard, command_end = pty.openpty()
        words = [sys.executable, "-m", "moevement_cli.main", "top", str(folder), "--interval", "0.05"]
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
        keys = command_end if has_keyboard else subprocess.DEVNULL
        self.process = subprocess.Popen(words, stdin=keys, stdout=command_end, stderr=command_end, env=environment)
        os.close(command_end)
        self.text = ""

    def until(self, text: str) -> None:
        """Read on until the terminal shows ``text`` in new output."""
        begin, deadline = len(self.text), time.monotonic() + 60
        while text not in self.text[begin:]:
            assert time.monotonic() < deadline, self.text
            try:
                self.text += os.read(self.keyboard, 1 << 16).decode(errors="replace")
            except OSError:  # the command has ended
                assert text in self.text[begin:], self.text
        assert self.process.stdin is None

    def closes(self) -> None:
        os.close(self.keyboard)

    def ends(self) -> int:
        self.process.wait(30)
        self.closes()
        return self.process.returncode


def test_in_a_terminal_it_goes_on_until_the_run_has_ended(tmp_path: Path) -> None:
    run = recovered_run(tmp_path, has_ended=False)
    terminal = Terminal(tmp_path)
    terminal.until("10/10")
    append(run.metrics_path, line(11))
    terminal.until("11/10")
    run.write_job(job(ended_at=time.time(), code=0))
    terminal.until("ended")
    assert terminal.ends() == 0


def test_a_key_ends_it(tmp_path: Path) -> None:
    recovered_run(tmp_path, has_ended=False)
    terminal = Terminal(tmp_path)
    terminal.until("10/10")
    os.write(terminal.keyboard, b"xq")
    terminal.until("recovery 1")
    assert terminal.ends() == 0
    assert "Traceback" not in terminal.text


@pytest.mark.parametrize("has_keyboard", [True, False])
def test_a_terminal_that_is_gone_ends_it(tmp_path: Path, *, has_keyboard: bool) -> None:
    recovered_run(tmp_path, has_ended=False)
    terminal = Terminal(tmp_path, has_keyboard=has_keyboard)
    terminal.until("10/10")
    terminal.closes()
    assert terminal.process.wait(30) == HUNG_UP


def test_ctrl_c_ends_it_in_order(tmp_path: Path) -> None:
    recovered_run(tmp_path, has_ended=False)
    terminal = Terminal(tmp_path)
    terminal.until("10/10")
    terminal.process.send_signal(signal.SIGINT)
    terminal.until("recovery 1")
    assert terminal.ends() == 0
    assert "Traceback" not in terminal.text
