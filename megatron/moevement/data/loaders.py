"""Megatron's data loaders: their own random generator, and batches that can be asked for again.

The batch of an iteration is a pure function of the samples consumed before it; a loader opened at that number gives
the same batches again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron.moevement.runtime.job import Job, current_job


def with_own_generator(original: Callable[..., Any]) -> Callable[..., Any]:
    """``build_pretraining_data_loader`` whose loaders do not touch the default generator.

    A loader draws its workers' seed whenever an iterator is opened. Only tensor-parallel rank 0 has a loader, and a
    recovery opens one more; both would move the generator, and on a machine without a GPU that one draws dropout.
    """

    @functools.wraps(original)
    def build_pretraining_data_loader(dataset: Any, consumed_samples: int, *args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        loader = original(dataset, consumed_samples, *args, **kwargs)
        if isinstance(loader, torch.utils.data.DataLoader) and loader.generator is None:
            loader.generator = torch.Generator().manual_seed(get_args().seed)
        return loader

    return build_pretraining_data_loader


def from_known_samples(original: Callable[..., Any]) -> Callable[..., Any]:
    """``build_train_valid_test_data_loaders`` that begins where the job says.

    In a job that goes on and has consumed no validation samples Megatron takes the number for one that an old
    checkpoint did not have, and guesses it.
    """

    @functools.wraps(original)
    def build_train_valid_test_data_loaders(*args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        settings = get_args()
        with current_job().rooms.aside() as room:
            if current_job().samples_are_known and not settings.phase_transition_iterations:
                room.put(settings, "iteration", 0)
            return original(*args, **kwargs)

    return build_train_valid_test_data_loaders


def train_batches_from(job: Job, consumed_train_samples: int) -> list[Iterator[dict[str, torch.Tensor]] | None]:
    """Iterators over this rank's training micro-batches, from the one after ``consumed_train_samples`` samples on.

    One for each virtual pipeline chunk; None where this rank reads no data. No communication, and no generator that
    training draws from is moved. Needs ``--dataloader-type single`` or ``cyclic``.
    """
    from megatron.training import get_args, training

    # Megatron's cyclic loaders begin anew at the end of the data, in another order.
    endless = training.cyclic_iter if get_args().dataloader_type == "cyclic" else iter
    loaders = [
        training.build_pretraining_data_loader(train_set, consumed_train_samples) for train_set, *_ in job.datasets
    ]
    return [None if loader is None else endless(loader) for loader in loaders]
