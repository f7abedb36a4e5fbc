"""Measured pages are named when the code that they measure has changed since."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from benchmarks.environment import measured_on
from scripts.page_ages import ROOT, measured, outdated


def _git(root: Path, *words: str, day: str = "2026-01-01") -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    dates = {"GIT_AUTHOR_DATE": f"{day}T12:00:00", "GIT_COMMITTER_DATE": f"{day}T12:00:00", "PATH": "/usr/bin:/bin"}
    command = ["git", "-C", str(root), *identity, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=dates).stdout.strip()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a checkout with two measured pages, a computed one, and code of a job and of the simulator."""
    for folder in ("benchmarks/papers", "moevement_core/engine", "moevement_core/simulator"):
        (tmp_path / folder).mkdir(parents=True)
    for page in ("ettr", "kills", "elastic", "papers/moc"):
        (tmp_path / f"benchmarks/{page}.md").write_text("# A page\n\n2026-01-02, a processor, 2 cores, 4 GiB\n")
    _git(tmp_path, "init", "-q")
    _git(tmp_path, "add", "-A")
    _git(tmp_path, "commit", "-q", "-m", "Begin")
    return tmp_path


def _change(root: Path, name: str, day: str) -> str:
    path = root / name
    path.write_text(f"{path.read_text() if path.exists() else ''}# {day}\n")
    _git(root, "add", "-A")
    _git(root, "commit", "-q", "-m", f"Change {name}", day=day)
    return _git(root, "rev-parse", "HEAD")


def _counts(root: Path) -> dict[str, tuple[str, int]]:
    """Return the day and the number of commits in each warning, by page."""
    lines = [re.match(r"(\S+): .*(20\d\d-\d\d-\d\d); (\d+) ", line) for line in outdated(root)]
    return {line[1]: (line[2], int(line[3])) for line in lines if line is not None}


def test_only_later_changes_of_what_runs_in_a_job_count(root: Path) -> None:
    _change(root, "moevement_core/engine/capture.py", "2026-01-02")
    _change(root, "moevement_core/simulator/pipeline.py", "2026-01-05")
    assert not list(outdated(root)), "the job's code changed on the day itself, and the simulator is in no job"
    _change(root, "moevement_core/engine/capture.py", "2026-01-05")
    _change(root, "benchmarks/kills.py", "2026-01-06")
    assert _counts(root) == {"benchmarks/ettr.md": ("2026-01-02", 1), "benchmarks/kills.md": ("2026-01-02", 2)}


def test_a_page_that_names_its_commit_counts_from_there(root: Path) -> None:
    commit = _change(root, "moevement_core/engine/capture.py", "2026-01-02")
    line = f"# A page\n\n2026-01-02, a processor, 2 cores, 4 GiB, Python 3.12.1, commit {commit[:10]}, torch 2\n"
    (root / "benchmarks/ettr.md").write_text(line)
    _change(root, "moevement_core/engine/own.py", "2026-01-02")
    assert _counts(root)["benchmarks/ettr.md"] == ("2026-01-02", 1)


def test_pages_of_this_project_are_found_and_new_ones_name_their_commit() -> None:
    pages = {page.path.stem: page for page in measured(ROOT)}
    assert {"ettr", "kills", "accuracy", "imbalance"} <= pages.keys()
    assert not {"moc", "elastic", "table6"} & pages.keys()
    if (ROOT / ".git").exists():
        assert ", commit " in measured_on("numpy")
