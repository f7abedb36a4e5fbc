"""Pages that only compute are what their scripts write today. Measured pages are not made again here.

Four pages read recorded data, which this repository does not hold. Their tests need ``MOEVEMENT_DATA``: a folder with
``routing/expert_loads_24layers_32experts.npz``, ``traces/gcp.csv`` and ``traces/aws-p3.csv``.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from importlib import import_module
from pathlib import Path

import pytest

DATA = os.environ.get("MOEVEMENT_DATA")
QUICK = ("table3", "table6", "moetion", "redo")
SLOW = ("table7", "moc", "windows", "field")
WITH_DATA = {
    "benchmarks.papers.figures": "--trace {data}/traces/gcp.csv",
    "benchmarks.papers.popularity": "{data}/routing/expert_loads_24layers_32experts.npz",
    "benchmarks.elastic": "{data}/routing/expert_loads_24layers_32experts.npz {data}/traces/aws-p3.csv --output {page}",
    "benchmarks.reorders": "{data}/routing/expert_loads_24layers_32experts.npz --output {page} --plot {page}.png",
}
_DATE = re.compile(r"20\d\d-\d\d-\d\d, .*?, \d+ cores, .*?(?=numpy|megatron-core)")
"""Date, machine and versions of Python, which change from one run of a script to the next."""


def _check(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str = "") -> None:
    module = import_module(name)
    page, written = Path(str(module.__file__)).with_suffix(".md"), tmp_path / "page.md"
    monkeypatch.setattr(module, "OUTPUT", written, raising=False)
    monkeypatch.setattr(sys, "argv", [name, *shlex.split(arguments.format(data=DATA, page=written))])
    module.main()
    kept, new = (_DATE.sub("", path.read_text(encoding="utf-8")).splitlines() for path in (page, written))
    differences = [pair for pair in zip(kept, new, strict=False) if pair[0] != pair[1]]
    assert not differences, f"python -m {name} writes other lines than {page.name} has"
    assert len(kept) == len(new)
    assert len(new) > 10


@pytest.mark.slow("a script simulates trainings at the scale of a paper")
@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.full) for name in SLOW)])
def test_a_page_of_a_paper_is_what_its_script_writes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _check(f"benchmarks.papers.{name}", tmp_path, monkeypatch)


@pytest.mark.full
@pytest.mark.skipif(DATA is None, reason="MOEVEMENT_DATA names no folder with the recorded data")
@pytest.mark.parametrize("name", WITH_DATA)
def test_a_page_from_recorded_data_is_what_its_script_writes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _check(name, tmp_path, monkeypatch, WITH_DATA[name])
