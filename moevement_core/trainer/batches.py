"""Batches of a loader that has a state of its own, so that an iteration that is executed again gets the same batch."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch

from moevement_core import log
from moevement_core.comms import plain
from moevement_core.errors import ConfigError, DataError, SnapshotError

LARGE_BYTES = 64 << 10
"""Bytes of a loader's state above which a rank warns, because each snapshot holds the state."""
MOST_BYTES = 4 << 20
"""Bytes of a loader's state that are refused when the binding is made."""


class StatefulLoader(Protocol):
    """Loader of batches, such as torchdata's ``StatefulDataLoader``, or an iterator with the same two methods."""

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the batches of an epoch, or over the rest of the epoch after a restored state."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state as plain data and tensors: which batch comes next."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; an iterator that is made afterwards continues from there."""


class Batches:
    """Batches of one rank: the n-th batch of the loader belongs to iteration n.

    Epochs follow each other. Batches of iterations that the job leaves out are drawn and dropped.

    Args:
        loader: loader of this rank, at its beginning.

    Raises:
        ConfigError: the loader's state is too large, or is more than plain data and tensors.
    """

    def __init__(self, loader: StatefulLoader) -> None:
        self._loader = loader
        self._iterator: Iterator[Any] | None = None
        self._drawn = 0
        """Number of batches drawn so far, those before a restored state included."""
        self._warns = True
        name = type(loader).__name__
        try:
            nbytes = _bytes(self.state())
        except SnapshotError as error:
            raise ConfigError(f"the state of the loader, a {name}: {error}") from None
        if nbytes > MOST_BYTES:
            raise ConfigError(
                f"the state of the loader, a {name}, has {nbytes:,} bytes; needs at most {MOST_BYTES:,}, because each "
                "snapshot holds it: let state_dict() return positions and seeds, not samples"
            )

    def batch(self, iteration: int) -> Any:
        """Return the batch of ``iteration``.

        Raises:
            DataError: the batch was drawn already and no state was restored since, or the loader has no batches.
        """
        if self._drawn >= iteration:
            raise DataError(f"the batch of iteration {iteration} was drawn before; the loader is at {self._drawn}")
        while self._drawn < iteration - 1:
            self._next()
        return self._next()

    def state(self) -> dict[str, Any]:
        """Return the state between two iterations, which later batches do not change."""
        state = {"drawn": self._drawn, "loader": copy.deepcopy(dict(self._loader.state_dict()))}
        if self._warns and self._drawn and (nbytes := _bytes(state)) > LARGE_BYTES:
            self._warns = False
            log.warning(
                f"the state of the loader has {nbytes:,} bytes, and each snapshot holds it; a loader whose state has "
                f"at most {LARGE_BYTES:,} bytes costs less"
            )
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state`, also one with fewer batches."""
        self._loader.load_state_dict(copy.deepcopy(dict(state["loader"])))
        self._iterator, self._drawn = None, state["drawn"]

    def _next(self) -> Any:
        if self._iterator is None:
            self._iterator = self._iter()
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._iterator = self._iter()
            try:
                batch = next(self._iterator)
            except StopIteration:
                raise DataError(
                    f"the loader has no batch after the first {self._drawn}, also not in a new epoch; let iter() begin "
                    "an epoch"
                ) from None
        self._drawn += 1
        return batch

    def _iter(self) -> Iterator[Any]:
        # Loaders of torch draw a seed here. A restored loader does so in another iteration than the original one.
        with torch.random.fork_rng(devices=[]):
            return iter(self._loader)


def _bytes(state: Mapping[str, Any]) -> int:
    data, tensors = plain.flatten(dict(state))
    return len(json.dumps(data)) + sum(tensor.nbytes for tensor in tensors)
