"""Ranks find out who shares a folder, with few questions to its disk."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from moevement_core.errors import ConfigError
from moevement_core.saving import folder as folders
from moevement_core.saving.folder import SharedFolder, find_folder
from moevement_core.storage.folder_store import FolderStore

PATIENCE_S = 60.0


class Ranks:
    """Ranks that are threads of this process, with a collective between them."""

    def __init__(self, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self._local = count, threading.local()
        self._barrier, self._values = threading.Barrier(count), dict[int, Any]()
        monkeypatch.setattr(folders, "all_gather_objects", lambda value, kind: self._gather(value))
        monkeypatch.setattr(folders.dist, "get_rank", lambda: self._local.rank)

    def _gather(self, value: Any) -> list[Any]:
        self._values[self._local.rank] = value
        self._barrier.wait(PATIENCE_S)
        values = [self._values[rank] for rank in range(self.count)]
        self._barrier.wait(PATIENCE_S)
        return values

    def run(self, work: Callable[[int], SharedFolder]) -> list[SharedFolder]:
        def of_rank(rank: int) -> SharedFolder:
            self._local.rank = rank
            return work(rank)

        with ThreadPoolExecutor(self.count) as pool:
            return list(pool.map(of_rank, range(self.count)))


@pytest.mark.parametrize(
    ("folder_of_rank", "nodes", "members"),
    [
        ("aaaa", "nnmm", [(0, 1, 2, 3)] * 4),
        ("aabb", "nnmm", [(0, 1), (0, 1), (2, 3), (2, 3)]),
        ("abab", "nnmm", [(0, 2), (1, 3), (0, 2), (1, 3)]),
        ("abba", "nmok", [(0, 3), (1, 2), (1, 2), (0, 3)]),
        ("abcd", "nmok", [(0,), (1,), (2,), (3,)]),
    ],
)
def test_ranks_that_see_the_same_folder_share_it(
    folder_of_rank: str, nodes: str, members: list[tuple[int, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(4, monkeypatch)
    shared = ranks.run(
        lambda rank: find_folder(
            "--moevement-persist-dir", str(tmp_path / folder_of_rank[rank]), nodes[rank], PATIENCE_S
        )
    )
    assert [place.members for place in shared] == members
    assert [place.store for place in shared] == [FolderStore(tmp_path / name) for name in folder_of_rank]
    assert not list(tmp_path.glob("*/*")), "no mark file is left"


def test_a_node_leaves_one_mark_and_asks_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, left = list[str](), list[str]()
    exists, touch = Path.exists, Path.touch

    def seen_exists(path: Path) -> bool:
        asked.append(path.name)
        return exists(path)

    def seen_touch(path: Path) -> None:
        left.append(path.name)
        touch(path)

    monkeypatch.setattr(Path, "exists", seen_exists)
    monkeypatch.setattr(Path, "touch", seen_touch)
    Ranks(8, monkeypatch).run(lambda rank: find_folder("--moevement-persist-dir", str(tmp_path), f"n{rank // 4}", 60.0))
    assert len(left) == 2
    assert len([name for name in asked if name in left]) == 2


def test_a_disk_that_lists_marks_late_leaves_a_rank_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: False)
    monkeypatch.setattr(Path, "glob", lambda path, pattern: iter(()))
    shared = Ranks(2, monkeypatch).run(lambda rank: find_folder("--flag", str(tmp_path), f"n{rank}", PATIENCE_S))
    assert [place.members for place in shared] == [(0,), (1,)]


def test_all_ranks_refuse_a_folder_that_one_cannot_make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    refused = list[str]()

    def work(rank: int) -> SharedFolder:
        try:
            return find_folder("--flag", str(tmp_path / ("file" if rank == 2 else "a")), "n", PATIENCE_S)
        except ConfigError as error:
            refused.append(str(error))
            return SharedFolder(FolderStore(tmp_path), ())

    Ranks(3, monkeypatch).run(work)
    assert len(refused) == 3
    assert len(set(refused)) == 1
    assert not list((tmp_path / "a").iterdir())
