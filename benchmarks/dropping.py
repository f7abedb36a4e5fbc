"""Training script whose routers drop a share of the routed tokens, for benchmarks/accuracy.py."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

SHARE_ENV = "MOEVEMENT_BENCHMARK_DROPPED"
SCRIPT = Path(__file__).parents[1] / "examples" / "pretrain_moe" / "pretrain_gpt.py"


def _drop(share: float) -> None:
    from megatron.core.transformer.moe.router import TopKRouter

    forward, generator = TopKRouter.forward, torch.Generator().manual_seed(7)

    def dropping(router: Any, *args: Any, **kwargs: Any) -> Any:
        probabilities, routing = forward(router, *args, **kwargs)
        if not router.training:
            return probabilities, routing
        keep = torch.rand(routing.shape, generator=generator) >= share
        return probabilities * keep, routing & keep

    TopKRouter.forward = dropping


if __name__ == "__main__":
    _drop(float(os.environ[SHARE_ENV]))
    sys.argv[0] = str(SCRIPT)
    runpy.run_path(str(SCRIPT), run_name="__main__")
