"""Page of the benchmark beside other systems: the committed record makes the committed page, and figures are right."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import page
from benchmarks.peers.job import RANKS
from benchmarks.peers.measure import Job, Report
from benchmarks.peers.systems import LOOPS, PLAIN, SYSTEMS, by_name

RECORD = json.loads(page.RECORDS.read_text(encoding="utf-8").splitlines()[-1])
OURS, PEER = "this project, replay", "torch checkpoint, restart"


def _job(iteration_s: float, digest: str = "a") -> dict[str, Any]:
    return {
        "iteration_s": iteration_s, "iteration_cpu_s": 2 * iteration_s, "rank_bytes": 3_000_000, "job_bytes": 9_000_000,
        "digest": digest, "kills": [], "phases": [],
    }  # fmt: skip


def _system(iteration_s: float, next_s: float, digest: str = "a") -> dict[str, Any]:
    kill = {"rank": 1, "newest": 5, "next_s": next_s, "all_s": next_s + 1, "repeated": 2}
    return {"rounds": [_job(iteration_s)], "kills": _job(1.0, digest) | {"kills": [kill]}, "error": None}


@pytest.fixture
def record() -> dict[str, Any]:
    return RECORD | {
        "systems": {
            PLAIN: {"rounds": [_job(0.1)], "kills": None, "error": None},
            OURS: _system(0.12, 1.0),
            PEER: _system(0.11, 5.0, digest="b"),
        }
    }


def test_the_page_is_made_from_the_committed_record(tmp_path: Path) -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.report(RECORD)
    page.draw(RECORD, tmp_path / page.FIGURE.name)
    assert (tmp_path / page.FIGURE.name).stat().st_size > 1000


def test_the_record_has_all_systems() -> None:
    assert list(RECORD["systems"]) == [system.name for system in SYSTEMS]


def test_rows_are_ratios_to_the_plain_job(record: dict[str, Any]) -> None:
    _, own, peer = page.rows_of(record)
    assert own.wall == pytest.approx(1.2)
    assert (own.next_s, own.all_s, own.bits, own.rank_mb) == (1.0, 2.0, "equal", 3.0)
    assert peer.bits == "different"


def test_the_comparison_names_better_systems_and_only_them(record: dict[str, Any]) -> None:
    wall, _, next_commit, *_ = page.comparison(page.rows_of(record))
    assert f"*{PEER}*" in wall
    assert PEER not in next_commit
    assert "1.00 s" in next_commit


def test_a_system_that_did_not_run_has_a_row(record: dict[str, Any]) -> None:
    record["systems"][PEER] = {"rounds": [], "kills": None, "error": "exit codes [1]"}
    assert "exit codes [1]" in page.report(record)


def test_lines_of_code_are_counted_against_the_plain_loop(tmp_path: Path) -> None:
    plain = LOOPS / by_name()[PLAIN].loop
    assert page.lines_of(plain) == 0
    more = tmp_path / "more.py"
    more.write_text(plain.read_text() + '\n\n# A comment.\nprint(\n    "more"\n)\n')
    assert page.lines_of(more) == 3


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.name)
def test_every_system_has_a_loop_and_processes(system: Any) -> None:
    commands = system.commands(Path("/nowhere/bin"), LOOPS / system.loop)
    assert [command for command in commands if str(LOOPS / system.loop) in command.words]
    assert all(os.path.isabs(command.words[0]) for command in commands)
    assert system.name == PLAIN or page.lines_of(LOOPS / system.loop) > 0


def test_the_length_of_an_iteration_is_the_shortest_of_newest_reports() -> None:
    reports = [Report(at_s, rank, 1, 1) for rank in range(RANKS) for at_s in (0.0, 5.0, 6.0 + rank)]
    assert Job._length_s(reports) == 1.0
