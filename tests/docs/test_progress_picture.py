"""The script draws README's picture from two runs with equal results, of which the second recovered exactly once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moevement_core.run.run_record import RunRecord
from scripts import progress_picture
from scripts.diagrams import ROOT
from tests.unit.monitoring.runs import failure, line, recovered_run


def drawn(failure_free: RunRecord, killed: RunRecord, output: Path) -> str:
    progress_picture.main([str(failure_free.folder), str(killed.folder), "--output", str(output)])
    return output.read_text(encoding="utf-8")


def test_the_seconds_of_each_part_stand_in_the_picture(tmp_path: Path) -> None:
    runs = recovered_run(tmp_path / "free"), recovered_run(tmp_path / "killed")
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", drawn(*runs, tmp_path / "picture.svg"))
    assert {f"{part} {seconds:.2f} s" for part, seconds in failure().parts().items()} <= set(texts)
    assert any(f"{failure().total_s:.1f} s" in text for text in texts)


def test_progress_is_counted_from_the_beginning_of_training(tmp_path: Path) -> None:
    seconds, iterations = progress_picture.progress(recovered_run(tmp_path / "run"))
    assert iterations == list(range(11))
    assert seconds[:7] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 12.0]


@pytest.mark.parametrize("failures", [0, 2])
def test_a_run_without_one_recovery_is_refused(failures: int, tmp_path: Path) -> None:
    free, killed = recovered_run(tmp_path / "free"), recovered_run(tmp_path / "killed")
    lines = [text for text in killed.events_path.read_text().splitlines() if '"failure"' not in text]
    killed.events_path.write_text("".join(text + "\n" for text in lines))
    for _ in range(failures):
        killed.event(failure())
    _is_refused(free, killed, tmp_path)


def test_runs_that_differ_are_refused(tmp_path: Path) -> None:
    free, killed = recovered_run(tmp_path / "free"), recovered_run(tmp_path / "killed")
    lines = killed.metrics_path.read_text().splitlines()
    killed.metrics_path.write_text("".join(text + "\n" for text in lines[:-1]))
    killed.metric(**line(10, 1.75, time=2_000_000.0))
    _is_refused(free, killed, tmp_path)


def _is_refused(free: RunRecord, killed: RunRecord, folder: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        drawn(free, killed, folder / "picture.svg")
    assert caught.value.code == 2
    assert not (folder / "picture.svg").exists()


@pytest.mark.parametrize("name", ["progress", "diagrams/architecture", "diagrams/window", "diagrams/recovery"])
def test_pictures_are_legible_in_both_themes(name: str) -> None:
    text = (ROOT / "docs" / f"{name}.svg").read_text(encoding="utf-8")
    assert "currentColor" in text
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"(fill|stroke): (black|#000000|#222222)", text)
    assert min(float(size) for size in re.findall(r"font-size: ([\d.]+)px", text)) >= 12
