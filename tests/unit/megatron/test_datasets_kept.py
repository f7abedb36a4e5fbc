"""Data sets survive a failure, and each virtual pipeline chunk gets its own again."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

from megatron.moevement.data.loaders import retain_datasets
from megatron.moevement.runtime.live import Live


def test_a_failure_between_two_chunks_swaps_no_data_sets() -> None:
    built: list[str] = []

    def build() -> str:
        built.append(f"sets {len(built)}")
        return built[-1]

    live = Live(model=[None, None])
    process: Any = SimpleNamespace(job=SimpleNamespace(live=live, rejoined=None))
    ask = partial(retain_datasets, process, build)
    assert [ask(), ask()] == ["sets 0", "sets 1"]
    process.job.rejoined = object()
    live.datasets_asked = 0  # a failure interrupts the job, which asks again from the first chunk
    assert ask() == "sets 0"
    live.datasets_asked = 0  # another failure, between the two chunks
    assert [ask(), ask()] == ["sets 0", "sets 1"] == live.datasets
    assert len(built) == 2


def test_what_an_interrupted_first_build_has_left_is_in_its_place() -> None:
    live = Live(model=[None, None])
    process: Any = SimpleNamespace(job=SimpleNamespace(live=live, rejoined=None))
    ask = partial(retain_datasets, process, iter("abcd").__next__)
    assert ask() == "a"
    live.datasets_asked = 0
    assert [ask(), ask()] == ["b", "c"] == live.datasets
