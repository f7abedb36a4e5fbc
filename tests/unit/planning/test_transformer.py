"""A model described by numbers equals the model that Megatron builds from the same flags, operator by operator."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.moevement import describe as megatron
from moevement_core.errors import ConfigError
from moevement_core.planning.transformer import Layout, MultiLatentAttention, Transformer, describe
from tests.unit.models import BASE, LAYOUT, as_plain

NAMES = {
    "pipeline": "--pipeline-model-parallel-size", "tensor": "--tensor-model-parallel-size",
    "context": "--context-parallel-size", "expert": "--expert-model-parallel-size",
    "expert_tensor": "--expert-tensor-parallel-size",
}  # fmt: skip
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 8}


@pytest.mark.parametrize(
    ("model", "layout", "flags"),
    [
        ({}, {}, []),
        ({"normalization": "LayerNorm", "swiglu": False}, {"tensor": 2, "sequence_parallel": True}, []),
        ({"untie_embeddings_and_output_weights": False, "num_query_groups": 2}, {"expert": 2}, []),
        ({"moe_shared_expert_intermediate_size": 80, "dense_layers": 1}, {"expert_tensor": 1, "tensor": 2}, []),
        ({"moe_layer_freq": 2, "kv_channels": 32}, {"pipeline": 1, "expert": 8}, []),
        ({"num_experts": 0}, {"expert": 1, "pipeline": 4}, []),
        ({"multi_latent_attention": MultiLatentAttention(**LATENT)}, {}, []),
        ({}, {"chunks": 2, "layers": (1, 1, 1, 1)}, ["--num-virtual-stages-per-pipeline-rank", "2"]),
    ],
)
def test_it_is_megatrons(model: dict[str, object], layout: dict[str, object], flags: list[str]) -> None:
    wanted, placed = {**BASE, **model}, {**LAYOUT, **layout}
    own = describe("made", Transformer(**wanted), Layout(**placed))  # type: ignore[arg-type]
    words = ["--micro-batch-size", "1", "--global-batch-size", "32", "--bf16", "--use-distributed-optimizer"]
    words += ["--max-position-embeddings", "32", "--position-embedding-type", "rope", "--disable-bias-linear", *flags]
    for name, value in wanted.items():
        words += _words(name, value, wanted)
    for name, flag in NAMES.items():
        if placed.get(name, 1) != 1 or (name == "expert_tensor" and name in placed):
            words += [flag, str(placed[name])]
    if placed.get("sequence_parallel"):
        words.append("--sequence-parallel")
    built = megatron.describe("made", words, 16)
    assert as_plain(own) == as_plain(built)


def _words(name: str, value: object, model: dict[str, object]) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if name in ("swiglu", "untie_embeddings_and_output_weights"):
        return [flag] if value else []
    if isinstance(value, MultiLatentAttention):
        words = ["--multi-latent-attention", "--qk-layernorm", "--rope-type", "rope"]
        return words + [word for key, size in LATENT.items() for word in ("--" + key.replace("_", "-"), str(size))]
    if name == "num_query_groups":
        return ["--group-query-attention", flag, str(value)]
    if name == "dense_layers":
        return ["--moe-layer-freq", f"[0]*{value}+[1]*{int(str(model['num_layers'])) - int(str(value))}"]
    if name in ("num_experts", "moe_router_topk", "moe_ffn_hidden_size") and not model["num_experts"]:
        return []
    return [flag, str(value)]


@pytest.mark.parametrize(
    ("model", "layout", "named"),
    [
        ({"num_layers": 0}, {}, r"\bnum_layers\b.*\b0\b.*\b1\b"),
        ({"moe_router_topk": 9}, {}, r"\b8 experts\b.*\bmoe_router_topk 9\b"),
        ({"num_experts": 6}, {}, r"\b6 experts\b.*\b4\b"),
        ({"ffn_hidden_size": 0, "moe_layer_freq": 2}, {}, r"\bffn_hidden_size\b"),
        ({}, {"ranks": 9}, r"\b9 ranks\b.*\bpipeline 2\b"),
        ({}, {"global_batch_size": 9}, r"\bbatch 9\b.*\b8\b"),
        ({}, {"layers": (1, 1)}, r"\blayers\b.*\[1, 1\].*\b4\b.*\b2 stages\b"),
        ({"normalization": "None"}, {}, r"\bnormalization\b.*'None'.*\bRMSNorm\b"),
    ],
)
def test_what_cannot_be_is_refused(model: dict[str, object], layout: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        describe("made", Transformer(**{**BASE, **model}), Layout(**{**LAYOUT, **layout}))  # type: ignore[arg-type]


def test_presets_are_their_own_sizes() -> None:
    """Check that presets have as many parameters as the models in MoEvement's section 5.4, within 2%."""
    from moevement_cli.simulate import SCENARIOS
    from moevement_core.simulator.scenario import load

    for path in sorted(Path(SCENARIOS).glob("deepseek_*b.yaml")):
        job = load(path).job
        held = sum(
            operator.parameters * (job.expert_parallel if operator.kind.value == "expert" else 1)
            for stage in job.stages
            for operator in stage.operators
        )
        assert held == pytest.approx(float(path.stem.split("_")[1][:-1]) * 1e9, rel=0.02), path.stem
