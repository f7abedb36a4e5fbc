"""Training batches that can be asked for again.

The batch of an iteration is a pure function of the samples consumed before it; a loader opened at that number gives
the same batches again.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron.moevement.runtime.live import Live


def train_batches_from(live: Live, consumed_train_samples: int) -> list[Iterator[dict[str, torch.Tensor]] | None]:
    """Iterators over this rank's training micro-batches, from the one after ``consumed_train_samples`` samples on.

    One for each virtual pipeline chunk; None where this rank reads no data. No communication, and no generator that
    training draws from is moved. Needs ``--dataloader-type single`` or ``cyclic``.
    """
    from megatron.training import get_args, training

    # Megatron's cyclic loaders start over at the end of the data, in another order.
    endless = training.cyclic_iter if get_args().dataloader_type == "cyclic" else iter
    loaders = [
        training.build_pretraining_data_loader(train_set, consumed_train_samples) for train_set, *_ in live.datasets
    ]
    return [None if loader is None else endless(loader) for loader in loaders]
