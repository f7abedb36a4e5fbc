"""Stand-in in torch for Transformer Engine's grouped linear, with the interface that Megatron's experts need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class GroupedLinear(torch.nn.Module):
    """Linear layers of all experts of a rank in one module.

    As in Transformer Engine, the layer computes no weight gradients if the first weight requires none when the forward
    pass runs.
    """

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[torch.Tensor], Any],
        **_: Any,
    ) -> None:
        super().__init__()
        self.num_gemms, self.config = num_gemms, config
        for expert in range(num_gemms):
            weight: Any = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
            init_method(weight)
            weight.allreduce = config.expert_model_parallel_size == 1
            setattr(self, f"weight{expert}", weight)

    def forward(self, x: torch.Tensor, counts: Sequence[int]) -> tuple[torch.Tensor, None]:
        weights = [getattr(self, f"weight{expert}") for expert in range(self.num_gemms)]
        if not weights[0].requires_grad:
            weights = [weight.detach() for weight in weights]
        return torch.cat([rows @ weight.T for rows, weight in zip(x.split(list(counts)), weights, strict=True)]), None
