"""Counters of the tokens that each expert gets, for trainers whose routers are their own code."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moevement_core.operators import OperatorTable, expert_name


class TokenCounts:
    """Counters of tokens by expert, which a model's routers add to and :class:`TorchBinding` reads.

    The strategy orders operators by these counts, and saves popular experts last (paper, section 3.5). The counters are
    on the device of the routers, so that adding never waits for it.

    Args:
        layers: numbers of the layers with experts, as in ``expert_name``.
        experts: number of experts of each of these layers, on all ranks together.
    """

    tokens_of_run: int | None = None
    """Tokens that each layer routes in the whole run, a token once for each of its experts; None if unknown."""

    def __init__(self, layers: Sequence[int], experts: int) -> None:
        self._layers, self._experts = tuple(layers), experts
        self._added: dict[int, torch.Tensor] = {}
        self._index_of: dict[str, int] = {}
        self.paused = False
        """True while tokens are not counted, so that a replay does not count them twice."""

    def add(self, layer: int, tokens: torch.Tensor) -> None:
        """Add what a router has counted. Every rank adds the tokens of its own share of the batch.

        Args:
            layer: number of the layer.
            tokens: tokens sent to each expert of the layer, ``[experts]``.
        """
        if self.paused:
            return
        if layer not in self._added:
            self._added[layer] = torch.zeros(self._experts, dtype=torch.float64, device=tokens.device)
        self._added[layer] += tokens.detach()

    def of_table(self, table: OperatorTable) -> TokenCounts:
        """Return these counters for the operators of ``table``. The engine calls it at every build."""
        self._index_of, self._width = dict(table.index_of), len(table)
        return self

    def take(self) -> torch.Tensor:
        """Return the numbers counted since the last call, ``[layers * experts]``, and reset the counters."""
        counted = [self._added.get(layer) for layer in self._layers]
        device = next((each.device for each in counted if each is not None), None)
        taken = torch.cat([
            torch.zeros(self._experts, dtype=torch.float64, device=device) if each is None else each for each in counted
        ])  # fmt: skip
        self._added = {}
        return taken

    def by_operator(self, taken: list[torch.Tensor]) -> torch.Tensor:
        """Return the results of several calls of :meth:`take` as float64 ``[calls, operators]`` on the host."""
        places = [
            self._index_of[expert_name(layer, expert)] for layer in self._layers for expert in range(self._experts)
        ]
        counts = torch.zeros(len(taken), self._width, dtype=torch.float64)
        counts[:, places] = torch.stack(taken).cpu()
        return counts
