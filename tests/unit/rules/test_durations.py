"""The table of durations is read back, and the check in CI finds tests that are too slow without a reason."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import durations
from tests.durations import LIMIT_S, TABLE, Case, committed, read, slowdown, table, too_slow
from tests.training import ROOT

CASES = [
    Case("tests/a.py::test_quick", 0.5, ""),
    Case("tests/a.py::test_long[x|y]", 30.0, "lease"),
    Case("tests/b.py::test_late", 21.0, ""),
]


def test_a_report_of_pytest_is_read_with_names_and_reasons(tmp_path: Path) -> None:
    source = "import pytest\n@pytest.mark.slow('why')\n@pytest.mark.parametrize('x', [1])\ndef test_it(x): pass\n"
    (tmp_path / "test_one.py").write_text(source)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.reporting",
        "-p",
        "no:cacheprovider",
        f"--rootdir={tmp_path}",
        "--junitxml=out.xml",
    ]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    subprocess.run([*command, "-c", "/dev/null", "."], cwd=tmp_path, env=environment, check=True, capture_output=True)
    (case,) = read([tmp_path / "out.xml"])
    assert (case.name, case.reason) == ("test_one.py::test_it[1]", "why")
    assert case.seconds >= 0


def test_a_table_is_read_back() -> None:
    page = table(CASES, "on a machine")
    assert committed(page) == {"tests/a.py": 30.5, "tests/b.py": 21.0}
    assert "| 30.0 | `tests/a.py::test_long[x\\|y]` | lease |" in page
    assert "test_quick" not in page


def test_a_test_over_the_limit_needs_a_reason() -> None:
    assert [case.name for case in too_slow(CASES, 1.0)] == ["tests/b.py::test_late"]
    assert too_slow(CASES, 1.1) == []


@pytest.mark.parametrize(("factor", "expected"), [(0.5, 1.0), (1.0, 1.0), (3.0, 3.0)])
def test_a_slow_machine_is_known_by_the_median_of_all_files(factor: float, expected: float) -> None:
    before = {"tests/a.py": 10.0, "tests/b.py": 20.0, "tests/c.py": 5.0, "tests/short.py": 0.01}
    now = [Case(f"{file}::test", seconds * factor, "") for file, seconds in before.items()]
    assert slowdown([*now, Case("tests/c.py::test_hangs", 1000.0, "")], before) == pytest.approx(expected)


def test_a_suspect_is_run_again_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(durations, "TABLE", Path(__file__))
    monkeypatch.setattr(durations, "committed", lambda text: {"tests/a.py": 30.5, "tests/b.py": 21.0})
    again = {"tests/b.py::test_late": 9.0}
    monkeypatch.setattr(
        durations, "_run_again", lambda cases: [Case(case.name, again[case.name], case.reason) for case in cases]
    )
    assert durations.check(CASES) == 0
    again["tests/b.py::test_late"] = LIMIT_S + 1
    assert durations.check(CASES) == 1
    assert "tests/b.py::test_late" in capsys.readouterr().err


def test_the_committed_table_is_one() -> None:
    seconds = committed(TABLE.read_text(encoding="utf-8"))
    assert len(seconds) > 50
    assert all((ROOT / file).is_file() for file in seconds)
