"""``moevement top`` shows a run as it stands, in a terminal and elsewhere."""

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

from moevement_cli.frame import frame, ranges, state_of
from moevement_cli.main import main
from moevement_core.monitoring.watched_run import WatchedRun
from tests.unit.monitoring.runs import BEGAN_AT, append, failure, job, line, recovered_run

NOW = BEGAN_AT + 20.0


def shown(folder: Path, width: int = 80) -> str:
    watched = WatchedRun(folder)
    watched.update()
    console = Console(width=width, no_color=True)
    with console.capture() as captured:
        console.print(frame(watched, NOW))
    return captured.get()


def values_of(text: str, first: str) -> dict[str, str]:
    """Names and values below each other, of the row whose first name it is."""
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
    assert values_of(text, "window") == {
        "window": "3", "persisted": "from 3", "lag": "1", "under way": "2", "snapshots": "4.0 MB", "log": "1.0 MB",
        "on disk": "to 5, 7.0 kB",
    }  # fmt: skip
    assert "n0    0-1    0" in text
    assert "n1    2-3    1" in text
    (who,) = failure().failures
    assert re.search(rf"\brecovery 1\b.*\b10 s\b.*\b4\.00 s\b.*{re.escape(who)}", text)
    for part, seconds in failure().parts().items():
        assert f"{part} {seconds:.2f}" in " ".join(text.split())


def test_the_bar_of_a_recovery_is_as_long_as_its_parts(tmp_path: Path) -> None:
    recovered_run(tmp_path)
    bar = shown(tmp_path).splitlines()[-1]
    assert [bar.count(shade) for shade in "█▓▒░▚▄"] == [9, 4, 4, 18, 9, 27]  # of 72, as 0.5, 0.25, 0.25, 1, 0.5, 1.5


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
    _, _, checkpoints, _, recoveries = re.split(r"\n\s*\n", text.strip())
    assert len(checkpoints.splitlines()) == len(recoveries.splitlines()) == 1
    assert not checkpoints.startswith("window")
    training = values_of(text, "iteration")
    assert (training["loss"], training["recoveries"]) == ("nan", "0")


@pytest.mark.parametrize(
    ("ranks", "after_s", "state"),
    [
        (4, 5.0, r"training"),
        (4, 500.0, r"(?!recovering)\D+\b8 min"),
        (3, 5.0, r"recovering\b\D+\b1\D+\b4 ranks\b\D*"),
        (3, 60.0, r"recovering\b\D+\b1\D+\b4 ranks\b\D*\b60 s"),
    ],
)
def test_the_state_of_a_run_that_goes_on(tmp_path: Path, ranks: int, after_s: float, state: str) -> None:
    run = recovered_run(tmp_path, has_ended=False)
    run.write_ranks([{"rank": rank, "pid": rank, "host": "h", "role": "active"} for rank in range(ranks)])
    watched = WatchedRun(tmp_path)
    watched.update()
    assert re.fullmatch(state, state_of(watched, BEGAN_AT + 16.0 + after_s))


def test_a_run_that_has_just_begun_and_one_that_has_ended(tmp_path: Path) -> None:
    (tmp_path / "new" / "logs").mkdir(parents=True)
    assert main(["top", str(tmp_path / "new"), "--once"]) == 0
    assert state_of(WatchedRun(tmp_path / "new"), NOW) == "starting"
    recovered_run(tmp_path / "old")
    assert state_of(WatchedRun(tmp_path / "old"), NOW) == "ended"


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
    assert has["figures"]["moevement_processes"] == {"active": 4, "spare": 1}
    assert has["nodes"][1] == {"node": "n1", "ranks": [2, 3], "spares": 1}


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["{}/none"], r"{}/none\b.*--run-dir\b"),
        (["{}"], r"{}\b[^/].*--run-dir\b"),
        (["{}", "--interval", "0"], r"--interval 0\b.*\b0\b"),
        (["{}", "--interval", "nan"], r"--interval nan\b.*\b0\b"),
        (["{}", "--often"], r"--often\b.*--help\b"),
    ],
)
def test_what_cannot_be_shown_is_one_line_and_two(
    words: list[str], found: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["top", *(word.format(tmp_path) for word in words)])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert re.fullmatch(f"moevement: .*{found.format(re.escape(str(tmp_path)))}.*\n", error), error


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
    """The command in a terminal of its own."""

    def __init__(self, folder: Path) -> None:
        self._ours, theirs = pty.openpty()
        words = [sys.executable, "-m", "moevement_cli.main", "top", str(folder), "--interval", "0.05"]
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
        self.process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
        os.close(theirs)
        self.text = ""

    def until(self, text: str) -> None:
        """Read until it shows ``text`` anew."""
        begin, deadline = len(self.text), time.monotonic() + 60
        while text not in self.text[begin:]:
            assert time.monotonic() < deadline, self.text
            try:
                self.text += os.read(self._ours, 1 << 16).decode(errors="replace")
            except OSError:  # it has ended
                assert text in self.text[begin:], self.text
        assert self.process.stdin is None

    def ends(self) -> int:
        self.process.wait(30)
        os.close(self._ours)
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


def test_ctrl_c_ends_it_in_order(tmp_path: Path) -> None:
    recovered_run(tmp_path, has_ended=False)
    terminal = Terminal(tmp_path)
    terminal.until("10/10")
    terminal.process.send_signal(signal.SIGINT)
    terminal.until("recovery 1")
    assert terminal.ends() == 0
    assert "Traceback" not in terminal.text
