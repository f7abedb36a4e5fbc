"""Folders to load windows from, of which some cannot be written, and some are none."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from moevement_core.errors import ConfigError
from moevement_core.persistence.manifest import Manifest
from moevement_core.session.folder import find_place
from moevement_core.session.window_files import windows_of_all

PATIENCE_S = 20.0


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process as a job of one rank, over loopback."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A mount that nobody can write to, with a window in it."""
    folder, place = tmp_path / "windows", tmp_path / "mounted"
    folder.mkdir()
    place.mkdir()
    written = Manifest("abcd", 3, 5, 5, {"iteration": 5}, {})
    (folder / written.name).mkdir()
    written.write(folder)
    for words in (["--bind", str(folder), str(place)], ["-o", "remount,ro,bind", str(place)]):
        if subprocess.run(["mount", *words], capture_output=True, check=False).returncode:
            pytest.skip("needs the right to mount")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.usefixtures("alone")
def test_windows_are_found_where_nobody_can_write(read_only: Path) -> None:
    place = find_place("--moevement-load", str(read_only), "n", PATIENCE_S, is_written=False)
    assert (place.path, place.members) == (read_only, (0,))
    assert [one.reaches for one in windows_of_all(place)] == [5]
    with pytest.raises(ConfigError, match=f"--moevement-persist-dir {read_only}: {os.strerror(errno.EROFS)}"):
        find_place("--moevement-persist-dir", str(read_only), "n", PATIENCE_S)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("is_written", [True, False])
@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("file", "File exists"), ("file/deep", "Not a directory"), ("x" * 300, "File name too long"),
        ("mounted/none", "Read-only file system|no such folder"), ("/dev/null", "File exists"),
        ("/proc/none", "No such"),
    ],
)  # fmt: skip
def test_what_is_no_folder_is_one_line(name: str, needed: str, *, is_written: bool, read_only: Path) -> None:
    (read_only.parent / "file").touch()
    with pytest.raises(ConfigError, match=needed) as raised:
        find_place("--moevement-load", str(read_only.parent / name), "n", PATIENCE_S, is_written=is_written)
    assert len(str(raised.value).splitlines()) == 1
    assert str(raised.value).startswith("--moevement-load ")
