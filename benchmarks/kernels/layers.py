"""Expert layers of the models of the paper's table 2, from our presets, and the distribution of tokens over experts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml
from moevement_kernels.activations import Activation

CONFIGS = Path(__file__).parents[2] / "examples" / "pretrain_moe" / "configs"
MODELS = ("moe_llava", "gpt_moe", "qwen_moe", "deepseek_moe")


@dataclass(frozen=True)
class Layer:
    """Expert layer of one rank, and the tokens routed to it in a micro-batch."""

    model: str
    hidden: int
    inner: int
    experts: int
    """Number of experts on this rank."""
    tokens: int
    """Number of tokens routed to this rank's experts if the routing is even. A token counts once for each expert."""
    kind: Activation

    @property
    def product_flop(self) -> int:
        """Floating-point operations to multiply every token by both weights once.

        A full backward pass does this twice. The backward pass of frozen experts does it once.
        """
        return 2 * self.tokens * self.hidden * self.inner * (3 if self.kind.is_gated else 2)


def layer_of(model: str) -> Layer:
    """Return the layer of a preset, with its expert parallelism."""
    flags = yaml.safe_load((CONFIGS / f"{model}.yaml").read_text(encoding="utf-8"))
    return Layer(
        model,
        hidden=flags["hidden-size"],
        inner=flags["moe-ffn-hidden-size"],
        experts=max(1, flags["num-experts"] // flags.get("expert-model-parallel-size", 1)),
        tokens=flags["micro-batch-size"] * flags["seq-length"] * flags["moe-router-topk"],
        kind=Activation.SWIGLU if flags.get("swiglu") else Activation.GELU,
    )


def counts_of(layer: Layer, is_skewed: bool, seed: int = 11) -> list[int]:
    """Return the tokens of each expert: equal, or by Zipf's law with an exponent of 1 over a random order."""
    share = np.ones(layer.experts)
    if is_skewed:
        share = np.random.default_rng(seed).permutation(1 / np.arange(1, layer.experts + 1))
    counts = np.floor(share / share.sum() * layer.tokens).astype(int)
    counts[int(counts.argmax())] += layer.tokens - counts.sum()
    return [int(count) for count in counts]
