"""Models and presets that several test modules use."""

from __future__ import annotations

from dataclasses import replace

from moevement_core.planning.job import JobShape
from tests.training import ROOT

BASE = {
    "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 1000, "seq_length": 32,
    "ffn_hidden_size": 96, "num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 48,
    "normalization": "RMSNorm", "swiglu": True, "untie_embeddings_and_output_weights": True,
}  # fmt: skip
LAYOUT = {"ranks": 16, "global_batch_size": 32, "pipeline": 2, "expert": 4}
PRESETS = sorted((ROOT / "examples" / "pretrain_moe" / "configs").glob("*.yaml"))
# By name: ranks, all parameters, and parameters that are active for a token, as in table 2 of MoEvement.
TABLE_2 = {
    "gpt_moe": (96, 7.3e9, 1.6e9),
    "qwen_moe": (96, 14.3e9, 2.7e9),
    "deepseek_moe": (96, 16.4e9, 3.3e9),
    "moe_llava": (96, 2.9e9, 2.0e9),
    "laptop": (4, None, None),
}


def as_plain(job: JobShape) -> dict[str, object]:
    """Return a job for comparison: without the order of operators and tensors, and without Adam's step counter."""
    stages = [
        (stage.sends_per_micro_batch, sorted((o.name, o.kind, sorted(o.tensors), o.shards) for o in stage.operators))
        for stage in job.stages
    ]
    fields = ("ranks", "layout", "micro_batches", "boundary_bytes", "chunks", "tokens", "experts_per_token",
              "seq_length", "hidden_size")  # fmt: skip
    regime = replace(job.regime, step_bytes=0)
    return {**{name: getattr(job, name) for name in fields}, "regime": regime, "stages": stages}
