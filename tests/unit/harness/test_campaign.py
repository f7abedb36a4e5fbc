"""A campaign of kills resumes from the records in its folder, and reports its progress."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

from moevement_core.strategies.config import RecoveryKind
from tests.soak import campaign
from tests.soak.cells import LAYOUTS, PER_NODE, RECIPES, RECOVERIES, draw_cell


def line(number: int, **fields: Any) -> dict[str, Any]:
    cell = draw_cell(random.Random(f"1/{number}"))
    return {
        "job": number, "seed": f"1/{number}", "commit": "abc", **cell.as_dict(), "kills": [0, 3], "nodes": ["1"],
        "recoveries": ["all stages"], "restarts": 0, "seconds": 36.0, "outcome": "equal", **fields,
    }  # fmt: skip


def test_a_torn_line_is_cut_off_and_the_next_one_follows(tmp_path: Path) -> None:
    path = tmp_path / "jobs.jsonl"
    assert campaign.read(path) == []
    campaign.append(path, line(0))
    with path.open("a") as file:
        file.write('{"job": 1, "ki')
    assert [record["job"] for record in campaign.read(path)] == [0]
    campaign.append(path, line(1))
    assert [record["job"] for record in campaign.read(path)] == [0, 1]
    path.write_text('{"jo')
    assert campaign.read(path) == []
    assert path.read_bytes() == b""


def test_every_kind_is_drawn_and_the_same_again_for_the_same_seed() -> None:
    cells = [draw_cell(random.Random(f"1/{number}")) for number in range(400)]
    assert cells == [draw_cell(random.Random(f"1/{number}")) for number in range(400)]
    assert {cell.layout for cell in cells} == set(LAYOUTS)
    assert {cell.recipe for cell in cells} == set(RECIPES)
    assert {cell.recovery for cell in cells} == set(RECOVERIES) <= set(RecoveryKind)
    assert {(cell.protection, cell.per_node) for cell in cells} >= {("parity", 1), ("copies", PER_NODE)}


def test_progress_counts_and_foresees() -> None:
    jobs = [line(number) for number in range(100)]
    done_and_wanted = r"\b200\b.*\b10000 kills\b.*\b100\b.*\b1000 nodes\b"
    taken_and_left = r"\b100 jobs\b.*\b1\.0 h\b.*\b49\.0 h\b"
    assert re.search(f"{done_and_wanted}.*{taken_and_left}", campaign.progress(jobs))
    assert re.search(r"\b0\b.*\b10000 kills\b", campaign.progress([]))


def test_the_section_takes_its_place_again_and_leaves_the_rest() -> None:
    page = "# Soak\n\nwhat stood there\n"
    once = campaign.put_in(page, campaign.report([line(0)]))
    twice = campaign.put_in(once + "\nrest\n", campaign.report([line(0), line(1, outcome="lost")]))
    assert twice.startswith(page)
    assert twice.endswith("\nrest\n")
    assert twice.count("## Campaign") == 1
    assert "| **all** | 2 | 4 | 2 | 2 | 0 | 1 | 0 |" in twice


def test_a_campaign_in_a_new_folder_goes_on_from_the_reported_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(campaign, "RECORD", tmp_path / "soak.jsonl")
    out = tmp_path / "out"
    out.mkdir()
    campaign.go_on_from_record(out)
    assert campaign.read(out / "jobs.jsonl") == []
    campaign.append(campaign.RECORD, {"job": 0})
    campaign.go_on_from_record(out)
    campaign.append(out / "jobs.jsonl", {"job": 1})
    campaign.go_on_from_record(out)
    assert campaign.read(out / "jobs.jsonl") == [{"job": 0}, {"job": 1}]


def test_two_campaigns_do_not_share_a_folder(tmp_path: Path) -> None:
    refused = pytest.raises(SystemExit, match=re.escape(f"--out {tmp_path}"))
    with campaign.alone(tmp_path), refused, campaign.alone(tmp_path):
        pass
