"""Megatron's MoE layer with experts in slots: replicas of an expert as its load asks for, tokens spread over them.

Megatron's dispatcher, experts and all-to-all are used as they are; to them every slot is an expert. What is ours is
which slot gets a token (Lazarus, section 4.2), before Megatron dispatches.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from moevement_kernels.dispatch import SlotTable, shares, to_slots

from megatron.moevement.elastic.slots import Slots, slots


def layer_with_slots(original: Any) -> Callable[..., Any]:
    """``MoELayer`` as specs name it: one with slots where experts are elastic."""

    @functools.wraps(original)
    def moe_layer(*args: Any, **kwargs: Any) -> Any:
        its = slots()
        return original(*args, **kwargs) if its is None else _classes().layer(its, *args, **kwargs)

    return moe_layer


@dataclasses.dataclass(frozen=True)
class _Classes:
    layer: Any
    dispatcher: Any


@functools.cache
def _classes() -> _Classes:
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensorFactory
    from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
    from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

    def kept(tensor: Any) -> Any:
        """A second replica on one rank: a checkpoint has each tensor once a rank, and this one stays as it is. At the
        start of a job it becomes equal to the first replica's.
        """
        return ShardedTensorFactory(
            tensor.key,
            tensor.data,
            lambda key, data, replica_id, flattened_range: {"kept": LocalNonpersistentObject(data)},
            lambda its: its["kept"],
            tensor.replica_id,
        )

    class SlotDispatcher(MoEAlltoAllTokenDispatcher):
        """Spreads the tokens of an expert over its replicas, then dispatches to slots as Megatron does to experts."""

        table: SlotTable
        routed: torch.Tensor | None = None
        """Tokens of each expert since it was last asked, of all ranks, int64 ``[E]``."""

        def dispatch_preprocess(
            self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            """Tokens ``[..., H]``, bool ``[T, E]`` and ``[T, E]``, all of this rank."""
            tokens = self._count(routing_map)
            slot_map = to_slots(routing_map, self.table, shares(tokens, self.table, dist.get_rank(self.ep_group)))
            return super().dispatch_preprocess(hidden_states, slot_map, probs[:, self.table.expert] * slot_map)

        def _count(self, routing_map: torch.Tensor) -> torch.Tensor:
            """Tokens of each expert on each rank, ``[N, E]``."""
            mine = routing_map.sum(0)
            tokens = mine.new_empty(self.ep_size, mine.numel())
            dist.all_gather_into_tensor(tokens.view(-1), mine, group=self.ep_group)
            if torch.is_grad_enabled():
                total = tokens.sum(0)
                self.routed = total if self.routed is None else self.routed + total
            return tokens

    class SlotLayer(MoELayer):
        """A layer whose experts stand in slots."""

        def __init__(self, its: Slots, config: Any, submodules: Any = None, *args: Any, **kwargs: Any) -> None:
            group = kwargs["pg_collection"].ep
            of_slots = copy.copy(config)
            of_slots.num_moe_experts = its.of_rank * group.size()

            def router(config: Any = None, **others: Any) -> Any:
                return submodules.router(config=of_experts, **others)

            of_experts = config
            super().__init__(of_slots, dataclasses.replace(submodules, router=router), *args, **kwargs)
            self.token_dispatcher = SlotDispatcher(
                self.num_local_experts, self.local_expert_indices, config=of_slots,
                pg_collection=kwargs["pg_collection"],
            )  # fmt: skip
            if self.use_shared_expert and self.shared_expert_overlap:
                self.token_dispatcher.set_shared_experts(self.shared_experts)
            self._slots = its

        def set_layer_number(self, layer_number: int) -> None:
            """Megatron's, from 1; the slots of this layer are known by it."""
            super().set_layer_number(layer_number)
            table = self._slots.table(layer_number - 1, self.ep_group.size())
            device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
            self.token_dispatcher.table = SlotTable.of([list(its) for its in table], self._slots.experts, device)

        def sharded_state_dict(
            self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
        ) -> dict[str, Any]:
            """Return Megatron's state with each expert once, whatever slot it is in: any number of
            ranks can load it.
            """
            metadata = ensure_metadata_has_dp_cp_group(metadata)
            state = {}
            for name, module in self._modules.items():
                if name == "experts":
                    state.update(self._experts_sharded(f"{prefix}experts.", sharded_offsets, metadata))
                elif module is not None and hasattr(module, "sharded_state_dict"):
                    state.update(module.sharded_state_dict(f"{prefix}{name}.", sharded_offsets, metadata))
            return state

        def _experts_sharded(self, prefix: str, offsets: tuple[Any, ...], metadata: Any) -> dict[str, Any]:
            layer, rank = self.layer_number - 1, self.ep_group.rank()
            state: dict[str, Any] = {}
            for slot, expert in enumerate(self.experts.local_experts):
                own, number = f"{prefix}local_experts.{slot}.", self._slots.expert(layer, rank, slot)
                if (metadata or {}).get("singleton_local_shards", False):
                    its = expert.sharded_state_dict(own, offsets, metadata)
                    replace_prefix_for_sharding(its, own, f"{prefix}experts.{number}.")
                else:
                    place = (len(offsets), number, self._slots.experts)
                    its = expert.sharded_state_dict(own, (*offsets, place), metadata)
                    replace_prefix_for_sharding(its, own, f"{prefix}experts.")
                for tensor in its.values():
                    replica = 0 if self._slots.is_first(layer, rank, slot) else 1 + rank * self._slots.of_rank + slot
                    tensor.replica_id = (*tensor.replica_id[:2], replica)
                is_second = number in self._slots.tables[layer][rank][:slot]
                state.update({name: kept(tensor) for name, tensor in its.items()} if is_second else its)
            return state

    return _Classes(SlotLayer, SlotDispatcher)
