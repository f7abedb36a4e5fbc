"""Commands that read run directories refuse damaged ones.

Each damage is tested with one command. The commands take turns, so that each command is tested with a damage to every
file that it reads.
tests/unit/run/test_damaged_records.py reads each damage with every function that reads run directories.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import pytest

from moevement_cli.main import main
from tests.bad_input.command import Need, Reason, Row, check
from tests.bad_input.damages import (
    CONFIG,
    DAMAGES,
    EVENTS,
    JOB,
    METRICS,
    RANKS,
    STRANGERS,
    SUMMARY,
    Damage,
    content,
)
from tests.unit.monitoring.runs import recovered_run

READERS = {
    "verify": "verify {run} {whole}", "report": "report {run}", "html": "report {run} --html {folder}/page.html",
    "plot": "report {run} --plot {folder}/plot.svg", "trace": "report {run} --trace {folder}/trace.json",
    "top": "top {run} --once", "json": "report {run} --json", "top_json": "top {run} --json",
}  # fmt: skip
READERS_OF = {
    METRICS: ("verify", "report", "html", "plot", "trace", "top"),
    EVENTS: ("verify", "report", "html", "trace", "top"),
    SUMMARY: ("verify", "report", "html"),
    RANKS: ("top", "top_json"),
    STRANGERS: ("top", "top_json"),
    JOB: ("report", "html", "top"),
    CONFIG: ("top", "top_json"),
}
"""Commands that read each file. The test gives ``top`` a run that has not ended."""
NO_METRICS = Damage("metrics empty", METRICS, content(METRICS, b""), ["{run}", "no metrics"])
"""Damage that only ``report`` refuses. ``top`` accepts it, because a running job may not have begun to train."""


def taking_turns() -> Iterator[tuple[str, Damage]]:
    """Yield each damage with the command whose turn it is."""
    turns = {file: cycle(readers) for file, readers in READERS_OF.items()}
    for damage in DAMAGES:
        yield next(turns[damage.file]), damage


CASES = list(taking_turns())


def test_every_command_meets_every_file_that_it_reads() -> None:
    met = {(reader, damage.file) for reader, damage in CASES}
    assert met == {(reader, file) for file, readers in READERS_OF.items() for reader in readers}


@pytest.mark.parametrize(("reader", "damage"), [*CASES, ("report", NO_METRICS), ("html", NO_METRICS)], ids=str)
def test_a_damaged_run_is_refused(
    reader: str, damage: Damage, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    is_watched = reader.startswith("top")
    run, whole = recovered_run(tmp_path / "run", has_ended=not is_watched), recovered_run(tmp_path / "whole")
    damage.change(run)
    file = () if damage is NO_METRICS else (f"{{run}}/{damage.file}",)
    row = Row(READERS[reader], [*file, *damage.needs])
    check(row, capfd, monkeypatch, run=run.folder, whole=whole.folder, folder=tmp_path)


@pytest.mark.parametrize("reader", READERS)
def test_the_undamaged_one_is_read(reader: str, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run, whole = recovered_run(tmp_path / "run"), recovered_run(tmp_path / "whole")
    with run.metrics_path.open("a") as file:
        file.write('{"iteration": 11, "lo')  # as a killed writer leaves it
    words = READERS[reader].format(run=run.folder, whole=whole.folder, folder=tmp_path)
    assert main(words.split()) == 0
    assert not capfd.readouterr().err


PLACES = ("{folder}/none", "{folder}", "/dev/null", "/proc/self/mem", "{folder}/file", "{folder}/{long}")
REPORTS = ("report", "html", "plot", "trace", "json", "report")
"""Form of the report that is tested at each place. One form per place is enough, as all forms share the reader."""
TOPS = ("top", "top_json") * 3


@pytest.mark.parametrize(
    ("reader", "place"),
    [*(("verify", place) for place in PLACES), *zip(REPORTS, PLACES, strict=True), *zip(TOPS, PLACES, strict=True)],
)
def test_no_run(
    reader: str, place: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("x")
    path = place.format(folder=tmp_path, long="x" * 300)
    # The message may cut a long name.
    needs: list[Need] = [str(tmp_path), Reason(errno.ENAMETOOLONG)] if place.endswith("{long}") else [path]
    whole = recovered_run(tmp_path / "runs" / "whole")  # directly in {folder}, it would be read in place of {folder}
    check(Row(READERS[reader], needs), capfd, monkeypatch, run=path, whole=whole.folder, folder=tmp_path)
