"""Settings of the job that wrote a window on disk, compared with those of a job that is to load it."""

from __future__ import annotations

from typing import Any

import pytest

from moevement_core.storage.manifest import DATA_SETTINGS, Manifest

SETTINGS: dict[str, Any] = {
    "lr": 0.1,
    "iterations_to_skip": [3, 7],
    DATA_SETTINGS: {"split": "9,1,0", "train_iters": 12},
}
MANIFEST = Manifest("beef", first=5, last=8, reaches=8, progress={}, settings=SETTINGS)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({}, []),
        ({"lr": 0.2}, ["--lr"]),
        ({"a_flag_of_later": 1}, []),
        ({"iterations_to_skip": [7]}, []),  # 3 is before the window
        ({"iterations_to_skip": [3, 7, 9]}, []),  # 9 is after it
        ({"iterations_to_skip": [3]}, ["--iterations-to-skip"]),
        ({"iterations_to_skip": [3, 6, 7]}, ["--iterations-to-skip"]),
        ({"iterations_to_skip": [5, 7]}, []),  # state 5 is in the window's first snapshot
        ({DATA_SETTINGS: {"split": "8,1,1"}}, []),
    ],
)
def test_what_is_replayed_has_to_be_the_same(change: dict[str, Any], named: list[str]) -> None:
    differences = MANIFEST.other_settings(SETTINGS | change)
    assert [words.split()[0] for words in differences] == named


def test_other_data_are_named() -> None:
    assert MANIFEST.other_data(SETTINGS) == []
    (difference,) = MANIFEST.other_data({DATA_SETTINGS: {"split": "8,1,1", "train_iters": 12, "seed": 1}})
    assert difference.startswith("--split 8,1,1")
