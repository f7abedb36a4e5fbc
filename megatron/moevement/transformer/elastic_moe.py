"""Megatron's MoE layer with experts in slots.

Popular experts have replicas in several slots, and the replicas share the tokens of the expert. Megatron's dispatcher,
experts and all-to-all run unchanged, and treat every slot as an expert. Before Megatron dispatches, this module decides
which slot gets a token (Lazarus, section 4.2).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import torch
import torch.distributed as dist
from moevement_kernels.dispatch import SlotTable, shares, to_slots

from megatron.moevement.elastic.slots import Slots, slots
from moevement_core.restart.generation import nodes_of


def layer_with_slots(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Build an MoE layer for a layer spec, with slots if this job's experts are in slots."""
    expert_slots = slots()
    return original(*args, **kwargs) if expert_slots is None else _slot_layer()(expert_slots, *args, **kwargs)


@functools.cache
def _slot_dispatcher() -> Any:
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    class SlotDispatcher(MoEAlltoAllTokenDispatcher):
        """Dispatcher that spreads an expert's tokens over its slots; Megatron then treats each slot as an expert."""

        table: SlotTable
        routed: torch.Tensor | None = None
        """Number of tokens of each expert on all ranks, int64 ``[experts]``; None if nothing has been counted.

        :class:`RoutedLoads` reads and resets the numbers after every iteration.
        """

        def dispatch_preprocess(
            self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            """Map the tokens of this rank to slots, and start Megatron's dispatch.

            Args:
                hidden_states: tokens ``[..., hidden size]``.
                routing_map: bool ``[tokens, experts]``.
                probs: probabilities ``[tokens, experts]``.
            """
            tokens = self._count(routing_map)
            slot_map = to_slots(routing_map, self.table, shares(tokens, self.table, dist.get_rank(self.ep_group)))
            return super().dispatch_preprocess(hidden_states, slot_map, probs[:, self.table.expert] * slot_map)

        def _count(self, routing_map: torch.Tensor) -> torch.Tensor:
            """Return the number of tokens of each expert on each rank, ``[ranks, experts]``. Collective."""
            local = routing_map.sum(0)
            tokens = local.new_empty(self.ep_size, local.numel())
            dist.all_gather_into_tensor(tokens.view(-1), local, group=self.ep_group)
            if torch.is_grad_enabled():
                total = tokens.sum(0)
                self.routed = total if self.routed is None else self.routed + total
            return tokens

    return SlotDispatcher


@functools.cache
def _slot_layer() -> Any:
    from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

    class SlotLayer(MoELayer):
        """MoE layer whose experts are in slots."""

        def __init__(self, expert_slots: Slots, config: Any, submodules: Any = None, *args: Any, **kwargs: Any) -> None:
            group = kwargs["pg_collection"].ep
            of_slots = copy.copy(config)
            of_slots.num_moe_experts = expert_slots.of_rank * group.size()

            def router(config: Any = None, **others: Any) -> Any:
                return submodules.router(config=of_experts, **others)

            of_experts = config
            super().__init__(of_slots, dataclasses.replace(submodules, router=router), *args, **kwargs)
            self.token_dispatcher = _slot_dispatcher()(
                self.num_local_experts, self.local_expert_indices, config=of_slots,
                pg_collection=kwargs["pg_collection"],
            )  # fmt: skip
            if self.use_shared_expert and self.shared_expert_overlap:
                self.token_dispatcher.set_shared_experts(self.shared_experts)
            self._slots = expert_slots

        def set_layer_number(self, layer_number: int) -> None:
            """Set the layer's number in the model, counted from 1, and look up the slots of this layer."""
            super().set_layer_number(layer_number)
            table = self._slots.table(layer_number - 1, nodes_of(dist.get_process_group_ranks(self.ep_group)))
            device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
            self.token_dispatcher.table = SlotTable.of([list(row) for row in table], self._slots.experts, device)

        def sharded_state_dict(
            self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
        ) -> dict[str, Any]:
            """Return the layer's state with each expert once, so that a job with any number of ranks can load it."""
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
                    tensors = expert.sharded_state_dict(own, offsets, metadata)
                    replace_prefix_for_sharding(tensors, own, f"{prefix}experts.{number}.")
                else:
                    place = (len(offsets), number, self._slots.experts)
                    tensors = expert.sharded_state_dict(own, (*offsets, place), metadata)
                    replace_prefix_for_sharding(tensors, own, f"{prefix}experts.")
                for tensor in tensors.values():
                    replica = 0 if self._slots.is_first(layer, rank, slot) else 1 + rank * self._slots.of_rank + slot
                    tensor.replica_id = (*tensor.replica_id[:2], replica)
                is_second = number in self._slots.tables[layer][rank][:slot]
                state.update({name: _kept(tensor) for name, tensor in tensors.items()} if is_second else tensors)
            return state

    return SlotLayer


def _kept(tensor: Any) -> Any:
    """Return a checkpoint entry that Megatron does not write, for a tensor of the second replica of an expert.

    Both replicas are on this rank, and a checkpoint has each tensor of a rank only once. When the job starts, the
    second replica becomes a copy of the first.
    """
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensorFactory

    return ShardedTensorFactory(
        tensor.key,
        tensor.data,
        lambda key, data, replica_id, flattened_range: {"kept": LocalNonpersistentObject(data)},
        lambda state: state["kept"],
        tensor.replica_id,
    )
