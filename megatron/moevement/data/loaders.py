"""Wrappers of Megatron's data loaders and data sets: a separate random generator, and reuse after failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, override

import torch
from torch.utils.data import DataLoader

from megatron.moevement.restart.solo_build import building_data_without_others
from megatron.moevement.runtime.job import Process
from moevement_core.restart.generation import waiting_for_others


def load_with_own_generator(
    process: Process, original: Callable[..., Any], dataset: Any, consumed_samples: int, *args: Any, **kwargs: Any
) -> Any:
    """Build a data loader that does not use the default generator, in place of ``build_pretraining_data_loader``.

    Whenever a loader opens an iterator, it draws a seed for its workers. On a machine without a GPU, dropout uses
    torch's default generator. If loaders drew from it too, dropout would differ between tensor-parallel ranks, because
    only the first of them has a loader. It would also change after a recovery, which opens further iterators.

    The function also delays the start of workers for validation and test sets until the first evaluation. Otherwise
    every recovery would start these workers, because it enters training again.
    """
    loader = original(dataset, consumed_samples, *args, **kwargs)
    if type(loader) is DataLoader:
        if loader.generator is None:
            loader.generator = torch.Generator().manual_seed(process.args.seed)
        if all(dataset is not sets[0] for sets in process.job.live.datasets):
            loader.__class__ = _OpenedLate
    return loader


class _OpenedLate(DataLoader[Any]):
    """Data loader that opens an iterator only when the first batch is requested."""

    @override
    def __iter__(self) -> Any:
        return _Late(super().__iter__)


class _Late(Iterator[Any]):
    def __init__(self, open_: Callable[[], Iterator[Any]]) -> None:
        self._open = open_
        self._iterator: Iterator[Any] | None = None

    @override
    def __next__(self) -> Any:
        if self._iterator is None:
            self._iterator = self._open()
        return next(self._iterator)


def load_from_known_samples(process: Process, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Build data loaders from the job's consumed samples on, in place of ``build_train_valid_test_data_loaders``.

    If a job continues after a failure and has not validated yet, its number of consumed validation samples is 0.
    Megatron takes this 0 for a number that an old checkpoint lacks, and guesses the number from the iteration. To
    prevent this, the function sets the iteration to 0 during the call.
    """
    settings, live = process.args, process.job.live
    with live.undo.nested() as inner:
        if live.samples_are_known and not settings.phase_transition_iterations:
            inner.set(settings, "iteration", 0)
        return original(*args, **kwargs)


def retain_datasets(process: Process, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Build data sets and keep them for replays, in place of ``build_train_valid_test_datasets``."""
    job = process.job
    live, is_rejoining = job.live, job.rejoined is not None
    chunk, live.datasets_asked = live.datasets_asked, live.datasets_asked + 1
    if is_rejoining and chunk < len(live.datasets):  # After a failure, each virtual stage reuses its data sets.
        return live.datasets[chunk]
    with live.undo.nested() as inner:
        if is_rejoining:
            building_data_without_others(inner, process.args.data_cache_path)
        with waiting_for_others():  # Rank 0 may build indices, which takes minutes.
            datasets = original(*args, **kwargs)
    live.datasets[chunk:] = [datasets]
    return datasets
