"""Folders of windows that can be read but not written, and paths that are no folders."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from moevement_core.errors import ConfigError
from moevement_core.saving.folder import find_folder
from moevement_core.saving.window_files import windows_of_all
from moevement_core.storage.folder_store import FolderStore
from moevement_core.storage.manifest import Manifest
from tests.bad_input.command import Need, Reason, unnamed

PATIENCE_S = 20.0


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make this process a job of one rank, over loopback."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder that has a window and is mounted for reading only."""
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
    place = find_folder("--moevement-load", str(read_only), "n", PATIENCE_S, is_written=False)
    assert (place.store, place.members) == (FolderStore(read_only), (0,))
    assert [window.reaches for window in windows_of_all(place)] == [5]
    with pytest.raises(ConfigError, match=f"--moevement-persist-dir {read_only}: {Reason(errno.EROFS)}"):
        find_folder("--moevement-persist-dir", str(read_only), "n", PATIENCE_S)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("is_written", [True, False])
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("file", errno.EEXIST), ("file/deep", errno.ENOTDIR), ("x" * 300, errno.ENAMETOOLONG),
        ("mounted/none", errno.EROFS), ("/dev/null", errno.EEXIST), ("/proc/none", errno.ENOENT),
    ],
)  # fmt: skip
def test_what_is_no_folder_is_one_line(name: str, reason: int, *, is_written: bool, read_only: Path) -> None:
    (read_only.parent / "file").touch()
    path = str(read_only.parent / name)
    with pytest.raises(ConfigError) as raised:
        find_folder("--moevement-load", path, "n", PATIENCE_S, is_written=is_written)
    # A folder that is only read is not created, so a read-only file system is no reason to refuse it.
    is_missing = reason == errno.EROFS and not is_written
    needs: list[Need] = ["--moevement-load", path, "no such" if is_missing else Reason(reason)]
    assert not unnamed(str(raised.value), needs), raised.value
    assert len(str(raised.value).splitlines()) == 1
