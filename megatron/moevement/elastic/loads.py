"""Recent token counts of the experts of this rank's layers, and the check that triggers a rebalance."""

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
    """Counter of tokens by expert, for this rank's layers with slots; equal on all ranks of a stage.

    Args:
        chunks: this rank's virtual stages.
        slots: slots of this process.
        interval: iterations between two checks of the loads.
    """

    def __init__(self, chunks: Sequence[Any], slots: Slots, interval: int) -> None:
        self._layers = {layer.layer_number - 1: layer.token_dispatcher for layer in slot_layers(chunks)}
        self._slots, self._interval = slots, interval
        self._committed: dict[int, torch.Tensor] = {}
        """Tokens of each expert by layer, on the device, since the last check that moved no experts."""
        self._last: dict[int, torch.Tensor] = {}
        """Tokens of each expert by layer in the last iteration, on the device."""

    def committed(self) -> None:
        """Add the tokens that were routed in an iteration; called when the iteration is committed."""
        for layer, dispatcher in self._layers.items():
            routed, dispatcher.routed = dispatcher.routed, None
            if routed is not None:
                self._last[layer] = routed
                before = self._committed.get(layer)
                self._committed[layer] = routed if before is None else before + routed

    def put(self, loads: dict[int, list[int]]) -> None:
        """Continue to count from ``loads``, by layer."""
        self._committed = {
            layer: torch.tensor(tokens, device=self._layers[layer].table.expert.device)
            for layer, tokens in loads.items()
            if layer in self._layers
        }

    def imbalance(self) -> float | None:
        """Return the imbalance of the last iteration: tokens of the rank with the most, over an even share.

        All ranks wait for the slowest, so this is the factor by which imbalance slows the expert computation. It is the
        mean over the layers of this rank's stage; None without any. The call waits for the device.
        """
        shares = [
            slowest_node(np.array(tokens.tolist(), dtype=np.int64), self._slots.tables[layer])
            for layer, tokens in self._last.items()
        ]
        return float(np.mean(shares)) if shares else None

    def forget_replayed(self) -> None:
        """Drop the tokens routed in re-executed iterations, which were counted before or are not needed any more."""
        for dispatcher in self._layers.values():
            dispatcher.routed = None

    def now(self) -> dict[int, list[int]]:
        """Return the tokens of each expert by layer, each a list of E counts; the call waits for the device."""
        return {layer: tokens.tolist() for layer, tokens in self._committed.items()}

    def regroup_if_uneven(self, committed: int) -> None:
        """Check the loads if an interval ends, and propose a regroup if another allocation is worth its migration.
        Collective.

        Raises:
            Regroup: another allocation is worth its migration; raised on all ranks.
        """
        if committed % self._interval:
            return
        # Ranks of stages without such layers have to vote too, because the reduction spans the job.
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
        held = [expert for row in self._slots.tables[layer] for expert in row]
        return monitor.proposed(np.bincount(held, minlength=self._slots.experts), self._slots.floor) is not None
