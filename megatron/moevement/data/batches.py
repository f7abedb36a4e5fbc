"""Training batches that a replay can read again.

The batch of an iteration depends only on the number of samples consumed before that iteration. A loader that is opened
at this number returns the same batches again.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron.moevement.runtime.live import Live


def train_batches_from(live: Live, consumed_train_samples: int) -> list[Iterator[dict[str, torch.Tensor]] | None]:
    """Return iterators over this rank's training micro-batches after the first ``consumed_train_samples`` samples.

    Each virtual stage has one iterator; it is None if this rank reads no data. The function does not communicate, and
    leaves the random generators of training unchanged. The job must use ``--dataloader-type single`` or ``cyclic``.
    """
    from megatron.training import training

    # Megatron's cyclic loaders start over at the end of the data, in another order.
    endless = training.cyclic_iter if live.args.dataloader_type == "cyclic" else iter
    loaders = [
        training.build_pretraining_data_loader(train_set, consumed_train_samples) for train_set, *_ in live.datasets
    ]
    return [None if loader is None else endless(loader) for loader in loaders]
