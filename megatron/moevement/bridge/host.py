"""Megatron-Bridge's trainer, as the binding sees it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any, override

from megatron.moevement.runtime.host import HostTrainer, Stepped, TrainLoop, own
from megatron.moevement.runtime.settings import settings_of
from moevement_core.util.undo import UndoStack


class MegatronBridge(HostTrainer):
    """Trainer of Megatron-Bridge, the package ``megatron.bridge.training``.

    Args:
        state: ``GlobalState`` of the job.
    """

    def __init__(self, state: Any) -> None:
        self.state = state
        self.record: list[Any] = []
        """List to which :meth:`share_keys` appends gathered keys."""
        self.kept: Sequence[Any] = ()
        """Recorded keys that a replacement uses in place of a gather; empty on a rank that gathers."""

    @override
    def share_keys(self, undo: UndoStack, record: list[Any], kept: Sequence[Any]) -> None:
        undo.set(self, "record", record)
        undo.set(self, "kept", kept)

    @override
    def config(self, args: Namespace) -> dict[str, Any]:
        return {**vars(args), **settings_of(args), "bridge": self.state.cfg.to_dict()}

    @property
    @override
    def finalize_model_grads(self) -> Callable[..., Any]:
        from megatron.bridge.training import setup

        function: Callable[..., Any] = setup.finalize_model_grads
        return function

    @override
    def timers(self) -> Any:
        return self.state.timers

    @override
    def loaders(self, args: Namespace, train_sets: Sequence[Any], consumed: int) -> list[Any]:
        from megatron.bridge.data import loaders
        from megatron.core import parallel_state

        train, data = self.state.cfg.train, self.state.cfg.dataset
        seed = getattr(data, "seed", None) or getattr(data, "random_seed", None) or self.state.cfg.rng.seed
        return [
            loaders.build_pretraining_data_loader(
                dataset=train_set, consumed_samples=consumed, dataloader_type=data.dataloader_type,
                micro_batch_size=train.micro_batch_size, num_workers=data.num_workers,
                data_sharding=data.data_sharding, collate_fn=getattr(train_set, "collate_fn", None),
                pin_memory=data.pin_memory, persistent_workers=data.persistent_workers,
                data_parallel_rank=parallel_state.get_data_parallel_rank(),
                data_parallel_size=parallel_state.get_data_parallel_world_size(),
                global_batch_size=train.global_batch_size, drop_last=data.drop_last, seed=seed,
            )
            for train_set in train_sets
        ]  # fmt: skip

    @override
    def step(
        self, loop: TrainLoop, batches: Any, chunks: list[Any], optimizer: Any, scheduler: Any, iteration: int
    ) -> Stepped:
        from megatron.bridge.training import train
        from megatron.core.pipeline_parallel import get_forward_backward_func

        pipeline, virtual = loop.pg_collection.pp.size(), self.state.cfg.model.virtual_pipeline_model_parallel_size
        losses, skipped, *_, grad_norm, _, _ = own(train.train_step)(
            loop.forward_step_func, batches, chunks, optimizer, scheduler, self.state,
            pg_collection=loop.pg_collection, p2p_communicator=loop.p2p_communicator,
            forward_backward_func=get_forward_backward_func(pp_size=pipeline, vp_size=virtual),
        )  # fmt: skip
        return Stepped(losses, bool(skipped), grad_norm)
