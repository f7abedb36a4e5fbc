"""Counts of routing decisions on each router's own device, without communication or waiting.

For each expert, a router counts the tokens that it routes to the expert. With ``--moevement-order soft``, it instead
sums the gate's probabilities of the expert. Only forward passes that record gradients count. So evaluation does not
count, and of the two passes of a recomputed layer only the second counts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron.moevement.patches import replace_on
from moevement_core.operators import OperatorTable, expert_name
from moevement_core.policy.popularity import Ordering


class RouterCounts:
    """Counters on the routers of this rank's virtual stages, reset whenever they are read.

    Args:
        chunks: this rank's unwrapped virtual stages.
        table: operators of the stage, which include the counted experts.
        ordering: ordering of operators. It decides whether tokens or probabilities are counted.
        tokens_of_run: tokens that each router assigns in the whole run, counting a token once for each of its experts.
    """

    def __init__(self, chunks: list[Any], table: OperatorTable, ordering: Ordering, tokens_of_run: int | None) -> None:
        self.tokens_of_run = tokens_of_run
        self.paused = False
        """True while this object counts nothing. A replay sets it, so that no token is counted twice."""
        self._soft = ordering is Ordering.SOFT_COUNT
        self._table = table
        self._sums: list[torch.Tensor] = []
        self._places: list[int] = []
        """Position of each expert in the operator table, router by router."""
        for chunk in chunks:
            for layer in routed_layers(chunk):
                router, number = layer.mlp.router, int(layer.layer_number) - 1
                experts = int(chunk.config.num_moe_experts)
                self._places += [table.index_of[expert_name(number, expert)] for expert in range(experts)]
                self._sums.append(torch.zeros(experts, dtype=torch.float64, device=router.weight.device))
                replace_on(router, "routing", functools.partial(self._counting, router, self._sums[-1]))

    def _counting(
        self,
        router: Any,
        sums: torch.Tensor,
        routing: Callable[..., Any],
        logits: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        result = routing(logits, *args, **kwargs)
        if router.training and torch.is_grad_enabled() and not self.paused:
            with torch.no_grad():
                if self._soft:
                    sums.add_(_probabilities(router, logits).sum(0).to(sums.dtype))
                else:
                    sums.add_(_assigned(router, *result[:2]).view(-1, sums.numel()).sum(0))
        return result

    def take(self) -> torch.Tensor:
        """Return this rank's sums since the last call, on the device, and reset the sums. The host does not wait."""
        if not self._sums:
            return torch.zeros(0, dtype=torch.float64)
        taken = torch.cat(self._sums)
        for sums in self._sums:
            sums.zero_()
        return taken

    def by_operator(self, taken: list[torch.Tensor]) -> torch.Tensor:
        """Convert the results of several calls of :meth:`take` to float64 ``[calls, operators]`` on the host.

        The call waits for the device.
        """
        return by_operator(taken, self._places, len(self._table))


def by_operator(taken: list[torch.Tensor], places: list[int], operators: int) -> torch.Tensor:
    """Arrange sums by operator: float64 ``[len(taken), operators]``, on the host. The call waits for the device.

    Args:
        taken: results of several calls of ``take``. Each result has one sum for each expert of all routers.
        places: position of each of these experts in the operator table.
        operators: number of operators in the table.
    """
    counts = torch.zeros(len(taken), operators, dtype=torch.float64)
    counts[:, places] = torch.stack(taken).cpu()
    return counts


def routed_layers(chunk: Any) -> list[Any]:
    """Return the layers of a virtual stage that have a router."""
    layers = list(getattr(getattr(chunk, "decoder", None), "layers", None) or [])
    return [layer for layer in layers if hasattr(getattr(layer, "mlp", None), "router")]


def _assigned(router: Any, probs: torch.Tensor, routing_map: torch.Tensor) -> torch.Tensor:
    """Return bool ``[tokens, experts]``: True where the router assigns the token to the expert.

    With ``--moe-pad-expert-input-to-capacity``, Megatron's routing map fills the capacity of every expert with further
    tokens of probability 0. These tokens do not count here. Otherwise, all experts would be equally popular.
    """
    return routing_map & (probs != 0) if router.config.moe_pad_expert_input_to_capacity else routing_map


def _probabilities(router: Any, logits: torch.Tensor) -> torch.Tensor:
    """Return the gate's probabilities of all experts, ``[tokens, experts]`` (P in MoEvement, appendix B)."""
    scores = logits.detach().float().view(-1, logits.shape[-1])
    if getattr(router.config, "moe_router_score_function", "softmax") == "sigmoid":
        scores = torch.sigmoid(scores)
        return scores / scores.sum(-1, keepdim=True).clamp_min(1e-20)
    return torch.softmax(scores, dim=-1)
