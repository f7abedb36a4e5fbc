"""Models of MoEtion's evaluation, as far as its text describes them."""

from __future__ import annotations

from dataclasses import dataclass

from moevement_core.planning.transformer import Layout, Transformer


@dataclass(frozen=True)
class Model:
    """Model of the paper, as far as the text describes it."""

    name: str
    parameters: float
    """Number of parameters, all experts included."""
    model: Transformer
    layout: Layout
    selected: int
    """Experts per layer in a snapshot (S). The paper gives S for some models; for others it is a quarter of the experts."""
    wasted_s: float
    """Seconds that a failure wastes under MoEtion, from figure 7."""
    steps_s: tuple[float | None, float | None, float | None, float | None]
    """Seconds of a checkpoint with one technique after the other, from figure 10; None: not printed."""


def gpt(*, layers: int, hidden: int, heads: int, experts: int, width: int) -> Transformer:
    """Return a GPT with top-1 experts as feed-forward layers.

    Callers choose ``width`` so that the model has the published number of parameters.
    """
    return Transformer(
        num_layers=layers, hidden_size=hidden, num_attention_heads=heads, vocab_size=50257, seq_length=2048,
        num_experts=experts, moe_router_topk=1, moe_ffn_hidden_size=width, swiglu=False, normalization="LayerNorm",
        untie_embeddings_and_output_weights=False,
    )  # fmt: skip


MODELS = (
    Model(name="MoE-GPT-1.6B-64E", parameters=58.7e9, model=gpt(layers=24, hidden=2048, heads=16, experts=64, width=9216),
          layout=Layout(ranks=64, pipeline=8, expert=4, global_batch_size=16, micro_batch_size=1), selected=6, wasted_s=11.9,
          steps_s=(5.7, None, None, 2.7)),
    Model(name="MoE-GPT-2.9B-16E", parameters=30.1e9, model=gpt(layers=32, hidden=2560, heads=32, experts=16, width=11072),
          layout=Layout(ranks=64, pipeline=4, expert=2, global_batch_size=16, micro_batch_size=1), selected=4, wasted_s=9.8,
          steps_s=(3.6, None, None, 1.5)),
)  # fmt: skip
LARGEST = Model(
    name="MoE-GPT-3.8B-8E", parameters=46.7e9, model=gpt(layers=40, hidden=3072, heads=32, experts=8, width=22912),
    layout=Layout(ranks=64, pipeline=8, expert=1, global_batch_size=16, micro_batch_size=1), selected=2, wasted_s=14.9,
    steps_s=(12.6, 10.9, 7.0, 3.9),
)  # fmt: skip
"""Model of figures 9 and 10. Its experts are wider than those of a dense GPT of 3.8 B parameters."""
