"""The batches of an iteration can be read again at any later time, and reading moves no random generator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.moevement.activate import process
from megatron.moevement.data.batches import train_batches_from
from megatron.moevement.worker import run_rank
from moevement_core.util.digest import digest
from tests.harness import run_ranks
from tests.training import SCRIPT, flags


def _train_and_ask_again(argv: list[str], micro_batches: int) -> dict[str, Any]:
    """Train, then read batches again; return digests of both reads, and whether a random generator moved."""
    from megatron.training import get_args, training

    seen: list[dict[str, Any]] = []
    original = training.build_pretraining_data_loader

    def spying(dataset: Any, consumed: int) -> Any:
        loader = original(dataset, consumed)
        if dataset is None or seen_loader:
            return loader
        seen_loader.append(True)
        collate = torch.utils.data.default_collate

        def collate_and_keep(samples: Any) -> Any:
            seen.append(collate(samples))
            return seen[-1]

        loader.collate_fn = collate_and_keep
        return loader

    seen_loader: list[bool] = []
    training.build_pretraining_data_loader = spying
    run_rank(argv)
    training.build_pretraining_data_loader = original
    args, live = get_args(), process().job.live
    assert len(live.datasets) == (args.virtual_pipeline_model_parallel_size or 1)
    before = torch.get_rng_state()
    again = {}
    for iteration in (3, 1, 4):
        (batches, *_) = train_batches_from(live, (iteration - 1) * args.global_batch_size)
        if batches is not None:
            again[iteration] = [digest(next(batches)) for _ in range(micro_batches)]
    first = [digest(batch) for batch in seen]
    return {"first": first, "again": again, "moved": not torch.equal(before, torch.get_rng_state())}


@pytest.mark.parametrize(
    ("nproc", "layout", "micro_batches"),
    [
        (2, {"expert_model_parallel_size": 2}, 2),
        (2, {"pipeline_model_parallel_size": 2, "dataloader_type": "cyclic"}, 4),
    ],
    ids=["expert-single", "pipeline-cyclic"],
)
def test_batches_come_again(nproc: int, layout: dict[str, Any], micro_batches: int) -> None:
    argv = [str(SCRIPT), *flags(**layout)]
    ranks = [
        outcome.result
        for outcome in run_ranks(_train_and_ask_again, nproc, argv, micro_batches, init_process_group=False)
    ]
    for rank in ranks:
        assert not rank["moved"]
        for iteration, batches in rank["again"].items():
            start = (iteration - 1) * micro_batches
            assert batches == rank["first"][start : start + micro_batches]
    assert len(set(ranks[0]["first"])) == len(ranks[0]["first"])
