"""Training batches that a replay can read again.

The batch of an iteration depends only on the number of samples consumed before that iteration. A loader that is opened
at this number returns the same batches again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megatron.moevement.runtime.live import Live


def train_batches_from(live: Live, consumed_train_samples: int) -> list[Iterator[dict[str, torch.Tensor]] | None]:
    """Return iterators over this rank's training micro-batches after the first ``consumed_train_samples`` samples.

    Each virtual stage has one iterator; it is None if this rank reads no data. The function does not communicate, and
    leaves the random generators of training unchanged. The job must use ``--dataloader-type single`` or ``cyclic``.
    """
    # Megatron's cyclic loaders start over at the end of the data, in another order.
    opened = _endless if live.args.dataloader_type == "cyclic" else iter
    loaders = live.host.loaders(live.args, [train_set for train_set, *_ in live.datasets], consumed_train_samples)
    return [None if loader is None else opened(loader) for loader in loaders]


def _endless(loader: Any) -> Iterator[dict[str, torch.Tensor]]:
    while True:
        yield from loader
