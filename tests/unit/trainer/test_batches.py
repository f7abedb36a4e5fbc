"""The n-th batch belongs to iteration n, whatever was drawn before a state was restored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from moevement_core.errors import ConfigError, DataError
from moevement_core.trainer import batches as module
from moevement_core.trainer.batches import Batches


class Numbers:
    """Loader of epochs of shuffled numbers, in another order in each epoch."""

    def __init__(self, size: int = 5) -> None:
        self.size, self.epoch, self.at, self.extra = size, 0, 0, b""

    def __iter__(self) -> Iterator[int]:
        torch.rand(1)  # as loaders of torch do
        if self.at == self.size:
            self.epoch, self.at = self.epoch + 1, 0
        return self._rest()

    def _rest(self) -> Iterator[int]:
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        while self.at < self.size:
            self.at += 1
            yield 100 * self.epoch + order[self.at - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "at": self.at, "extra": self.extra}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epoch, self.at, self.extra = state["epoch"], state["at"], state["extra"]


class Stream:
    """Iterator without epochs, whose state_dict returns the object that it changes."""

    def __init__(self) -> None:
        self._state = {"next": torch.zeros((), dtype=torch.int64)}

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self._state["next"] += 1
        return int(self._state["next"])

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._state = dict(state)


@pytest.mark.parametrize("make", [Numbers, Stream])
@pytest.mark.parametrize("boundary", [0, 3, 5, 7, 10])
def test_batches_come_again(make: type, boundary: int) -> None:
    batches = Batches(make())
    states, drawn = [batches.state()], list[int]()
    for iteration in range(1, 14):
        drawn.append(batches.batch(iteration))
        states.append(batches.state())
    batches.restore(states[boundary])
    assert [batches.batch(iteration) for iteration in range(boundary + 1, 14)] == drawn[boundary:]
    other = Batches(make())
    other.restore(states[boundary])
    assert [other.batch(iteration) for iteration in range(boundary + 1, 14)] == drawn[boundary:]
    assert other.state() == batches.state()


def test_a_new_iterator_draws_no_random_number_of_the_trainer() -> None:
    batches, state = Batches(Numbers()), torch.random.get_rng_state()
    batches.batch(7)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_batches_of_iterations_that_are_left_out_are_dropped() -> None:
    batches, all_batches = Batches(Numbers()), Batches(Numbers())
    drawn = [all_batches.batch(iteration) for iteration in range(1, 9)]
    assert [batches.batch(1), batches.batch(2), batches.batch(8)] == [drawn[0], drawn[1], drawn[7]]


def test_a_batch_is_drawn_once() -> None:
    batches = Batches(Numbers())
    batches.batch(2)
    with pytest.raises(DataError, match="2"):
        batches.batch(2)


def test_a_loader_without_batches_is_refused() -> None:
    with pytest.raises(DataError, match="epoch"):
        Batches(Numbers(0)).batch(1)


def test_a_state_that_no_snapshot_can_hold_is_refused() -> None:
    loader = Numbers()
    loader.extra = bytes(module.MOST_BYTES)
    with pytest.raises(ConfigError, match=r"Numbers\b.*\b4,194,304\b"):
        Batches(loader)
    loader.extra = object()  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="Numbers"):
        Batches(loader)


def test_a_large_state_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    loader = Numbers()
    batches = Batches(loader)
    loader.extra = bytes(module.LARGE_BYTES)
    for iteration in (1, 2):
        batches.batch(iteration)
        batches.state()
    assert len(caplog.messages) == 1
