"""Recent token counts of the experts of this rank's layers, and the trigger for another placement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron.moevement.elastic.replicas import slot_layers
from megatron.moevement.elastic.slots import Slots
from moevement_core.elastic.placement import slowest_node
from moevement_core.elastic.rebalance import Hysteresis, LoadMonitor
from moevement_core.restart.generation import Regroup


class RoutedLoads:
    """Counts tokens by expert, in this rank's layers with slots; equal on all ranks of a stage.

    Args:
        chunks: this rank's virtual stages.
        slots: of this process.
        interval: iterations between two looks.
    """

    def __init__(self, chunks: Sequence[Any], slots: Slots, interval: int) -> None:
        self._layers = {layer.layer_number - 1: layer.token_dispatcher for layer in slot_layers(chunks)}
        self._slots, self._interval = slots, interval
        self._committed: dict[int, torch.Tensor] = {}
        """Tokens of each expert by layer, on the device, since the last look at the loads that moved no experts."""
        self._last: dict[int, torch.Tensor] = {}
        """Counts of the last iteration."""

    def committed(self) -> None:
        """An iteration was committed: what was routed in it counts."""
        for layer, dispatcher in self._layers.items():
            routed, dispatcher.routed = dispatcher.routed, None
            if routed is not None:
                self._last[layer] = routed
                before = self._committed.get(layer)
                self._committed[layer] = routed if before is None else before + routed

    def put(self, loads: dict[int, list[int]]) -> None:
        """Count on from these."""
        self._committed = {
            layer: torch.tensor(its, device=self._layers[layer].table.expert.device)
            for layer, its in loads.items()
            if layer in self._layers
        }

    def imbalance(self) -> float | None:
        """Tokens of the rank with the most over those of an even share, in the last iteration: what experts, for which
        all wait, took longer than they could. Mean over layers of this rank's stage; None without any. Waits for the
        device.
        """
        shares = [
            slowest_node(np.array(tokens.tolist(), dtype=np.int64), self._slots.tables[layer])
            for layer, tokens in self._last.items()
        ]
        return float(np.mean(shares)) if shares else None

    def forget_replayed(self) -> None:
        """Forget what was routed in re-executed iterations: it has been counted, or is not needed any more."""
        for dispatcher in self._layers.values():
            dispatcher.routed = None

    def now(self) -> dict[int, list[int]]:
        """Return the counts by layer, ``[E]``; waits for the device."""
        return {layer: its.tolist() for layer, its in self._committed.items()}

    def regroup_if_uneven(self, committed: int) -> None:
        """Check the loads before some iterations: propose a regroup if another allocation is worth its migration.

        Every rank of the job calls it.

        Raises:
            Regroup: it would be; on every rank.
        """
        if committed % self._interval:
            return
        # Every rank votes, those of stages without such layers, too.
        wanted = torch.tensor(
            [float(any(self._proposes(layer) for layer in self._committed))], device=torch.cuda.current_device()
        )
        dist.all_reduce(wanted, dist.ReduceOp.MAX)
        if wanted.item():
            raise Regroup("the loads of experts ask for another placement")
        self._committed.clear()

    def _proposes(self, layer: int) -> bool:
        monitor = LoadMonitor(self._slots.experts, Hysteresis(interval=1))
        monitor.count(np.array(self._committed[layer].tolist(), dtype=np.int64))
        held = [expert for its in self._slots.tables[layer] for expert in its]
        return monitor.proposed(np.bincount(held, minlength=self._slots.experts), self._slots.floor) is not None
