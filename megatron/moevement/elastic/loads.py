"""Recent token counts of the experts in this rank's layers, and the check whether experts should move between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron.moevement.elastic.replicas import slot_layers
from megatron.moevement.elastic.slots import Slots
from moevement_core.elastic.allocation import better_allocation
from moevement_core.elastic.placement import slowest_node
from moevement_core.restart.generation import Regroup


class RoutedLoads:
    """Counter of the tokens that each expert receives, for this rank's layers with expert slots.

    Each rank of a stage counts the tokens of all ranks of the stage, so these ranks have equal counts.

    Args:
        chunks: this rank's virtual stages.
        slots: slots of this process.
        interval: iterations between two checks of the loads.
    """

    def __init__(self, chunks: Sequence[Any], slots: Slots, interval: int) -> None:
        self._layers = {layer.layer_number - 1: layer.token_dispatcher for layer in slot_layers(chunks)}
        self._slots, self._interval = slots, interval
        self._committed: dict[int, torch.Tensor] = {}
        """Tokens that each expert received since the last check of the loads, by layer, on the device.

        A check that makes experts move does not reset these counts, because the new placement follows from them.
        """
        self._last: dict[int, torch.Tensor] = {}
        """Tokens that each expert received in the last iteration, by layer, on the device."""

    def committed(self) -> None:
        """Add the token counts of the iteration that was just committed."""
        for layer, dispatcher in self._layers.items():
            routed, dispatcher.routed = dispatcher.routed, None
            if routed is not None:
                self._last[layer] = routed
                before = self._committed.get(layer)
                self._committed[layer] = routed if before is None else before + routed

    def put(self, loads: dict[int, list[int]]) -> None:
        """Set the token counts of each layer to ``loads``. Later iterations add their tokens to these counts."""
        self._committed = {
            layer: torch.tensor(tokens, device=self._layers[layer].table.expert.device)
            for layer, tokens in loads.items()
            if layer in self._layers
        }

    def imbalance(self) -> float | None:
        """Return the imbalance of the last iteration, as a mean over the layers of this rank's stage.

        The imbalance of a layer is the largest token count of a rank, divided by the mean over ranks. All ranks wait
        for the rank with the most tokens, so the expert computation is slower by this factor. The result is None if no
        layer has counted tokens. The call waits for the device.
        """
        shares = [
            slowest_node(np.array(tokens.tolist(), dtype=np.int64), self._slots.tables[layer])
            for layer, tokens in self._last.items()
        ]
        return float(np.mean(shares)) if shares else None

    def forget_replayed(self) -> None:
        """Drop the token counts of replayed iterations, because these iterations were counted before the failure."""
        for dispatcher in self._layers.values():
            dispatcher.routed = None

    def now(self) -> dict[int, list[int]]:
        """Return how many tokens each expert received since the last check of the loads, by layer.

        The call waits for the device.
        """
        return {layer: tokens.tolist() for layer, tokens in self._committed.items()}

    def regroup_if_uneven(self, committed: int) -> None:
        """Check the loads of experts if iteration ``committed`` ends an interval. Collective.

        Raises:
            Regroup: a new allocation of experts is worth the migration; every rank raises this exception.
        """
        if committed % self._interval:
            return
        # The reduction spans the job, so ranks of stages without MoE layers take part as well.
        wanted = torch.tensor(
            [float(any(self._proposes(layer) for layer in self._committed))], device=torch.cuda.current_device()
        )
        dist.all_reduce(wanted, dist.ReduceOp.MAX)
        if wanted.item():
            raise Regroup("expert loads are uneven; all ranks meet to place the experts anew")
        self._committed.clear()

    def _proposes(self, layer: int) -> bool:
        held = [expert for row in self._slots.tables[layer] for expert in row]
        replicas = np.bincount(held, minlength=self._slots.experts)
        tokens = np.array(self._committed[layer].tolist(), dtype=np.int64)
        return better_allocation(tokens, replicas, self._slots.floor) is not None
