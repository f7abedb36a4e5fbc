"""Files of a job are private to its user, whatever the umask, unless a flag or a variable says otherwise."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from moevement_core.errors import ConfigError
from moevement_core.run.run_record import RunRecord
from moevement_core.storage.manifest import Manifest, make_window_folder
from moevement_core.util import file_modes
from moevement_core.util.file_modes import ENV, make_folder, use_file_mode
from moevement_core.util.lock import acquire


@pytest.fixture(autouse=True)
def _lax(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(file_modes, "_now", None)
    monkeypatch.delenv(ENV, raising=False)
    before = os.umask(0)
    yield
    os.umask(before)


def write(folder: Path) -> None:
    lock = acquire(folder / "run", "job", "--run-dir")
    record = RunRecord(folder / "run")
    record.begin({"a": 1}, 1)
    record.metric(iteration=1)
    record.write_ranks([])
    record.write_placement(1, {})
    windows = folder / "windows"
    make_window_folder(windows, "window_0000001_abcd")
    Manifest("abcd", 1, 1, 1, {"iteration": 1}, {}).write(windows)
    lock.release()


def modes(folder: Path) -> tuple[set[int], set[int]]:
    """Return the modes of all folders and those of all files below ``folder``."""
    entries = [(path, stat.S_IMODE(path.stat().st_mode)) for path in folder.rglob("*")]
    assert len(entries) > 8
    return {mode for path, mode in entries if path.is_dir()}, {mode for path, mode in entries if path.is_file()}


def test_folders_and_files_are_private(tmp_path: Path) -> None:
    write(tmp_path)
    # Parents of the requested folders keep their modes, because they may be shared.
    assert modes(tmp_path) == ({0o700}, {0o600})


@pytest.mark.parametrize(("asked", "folder", "file"), [("group", 0o750, 0o640), ("all", 0o755, 0o644)])
def test_others_may_read_where_that_is_asked_for(asked: str, folder: int, file: int, tmp_path: Path) -> None:
    use_file_mode(asked)
    write(tmp_path)
    assert modes(tmp_path) == ({folder}, {file})


def test_the_environment_has_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV, "group")
    make_folder(tmp_path / "a")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o750
    use_file_mode("private")
    make_folder(tmp_path / "b")
    assert stat.S_IMODE((tmp_path / "b").stat().st_mode) == 0o700
    monkeypatch.setenv(ENV, "everyone")
    refused, known = r"--moevement-file-mode\b.*\bMOEVEMENT_FILE_MODE=everyone\b", r"\bprivate\b.*\bgroup\b.*\ball\b"
    with pytest.raises(ConfigError, match=f"{refused}.*{known}"):
        use_file_mode(None)


def test_a_folder_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    make_folder(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
