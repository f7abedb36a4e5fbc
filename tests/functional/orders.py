"""Job whose routers are counted by the test itself, beside the product's counters."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

from megatron.moevement.activate import process
from megatron.moevement.worker import run_rank

TOKENS, CHANCES = "tokens", "chances"


def counted_and_ordered(argv: list[str]) -> dict[str, Any]:
    """Train with sparse checkpoints; return this rank's routing decisions, and the orders of its stage.

    The counts follow from what Megatron's routers get and return, without any counter of the product.

    ``tokens`` and ``chances``: iteration -> expert -> tokens of this rank that reached the expert, or the sum of the
    gate's probabilities. ``orders``: first iteration of a window -> operators in the order of saving. ``scores``: first
    iteration of a window -> expert -> popularity by the product's account.
    """
    import torch
    from megatron.core.transformer.moe.router import TopKRouter

    from moevement_core.engine.checkpointer import Checkpointer
    from moevement_core.strategies.moevement import MoEvement

    counted: dict[str, dict[int, Counter[str]]] = {TOKENS: {}, CHANCES: {}}
    orders: dict[int, list[str]] = {}
    scores: dict[int, dict[str, float]] = {}
    forward, capture = TopKRouter.forward, Checkpointer.capture

    def forward_and_count(self: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        probs, routing_map = forward(self, inputs, *args, **kwargs)
        if self.training and torch.is_grad_enabled():
            iteration = process().job.live.iteration + 1
            with torch.no_grad():
                logits = inputs.double().flatten(0, 1) @ self.weight.double().T
                sums = {TOKENS: (probs > 0).sum(0), CHANCES: logits.softmax(-1).sum(0)}
            for what, values in sums.items():
                to = counted[what].setdefault(iteration, Counter())
                for expert, value in enumerate(values.tolist()):
                    to[f"layers.{self.layer_number - 1}.experts.{expert}"] += value
        return probs, routing_map

    def capture_and_note(self: Checkpointer, iteration: int, record: Any, **options: Any) -> None:
        session = process().job.session
        assert session is not None
        schedule, strategy = self.history.at(iteration), session.saving.windows.strategy
        assert isinstance(strategy, MoEvement)
        table = strategy.table
        if iteration == schedule.start:
            orders[iteration] = [table.names[place] for place in schedule.order]  # type: ignore[attr-defined]
            popularity = strategy.popularity.scores
            scores[iteration] = {table.names[i]: float(popularity[i]) for i in table.is_expert.nonzero()[0]}
        capture(self, iteration, record, **options)

    noting = patch.object(Checkpointer, "capture", capture_and_note)
    with patch.object(TopKRouter, "forward", forward_and_count), noting:
        run_rank(argv)
    by_iteration = {what: {i: dict(by) for i, by in of_iteration.items()} for what, of_iteration in counted.items()}
    return by_iteration | {"orders": orders, "scores": scores}
