"""Description of a transformer with experts and of its layout, for planning and simulation without Megatron.

Sizes equal those that Megatron computes, and a test compares them operator by operator. The description covers the
models of the papers: dense and MoE layers, shared experts, grouped-query and multi-latent attention, LayerNorm or
RMSNorm, gated or plain experts, and linear layers without biases. Megatron itself describes all other models from its
flags (``megatron.moevement.describe``). Fields have the names of Megatron's flags.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from moevement_core.errors import ConfigError
from moevement_core.operators import EMBEDDING, HEAD, OperatorKind, expert_name, gate_name, layer_name, non_expert_name
from moevement_core.planning.job import JobShape, OperatorShape, StageShape
from moevement_core.precision import MIXED, Regime, TensorShape

VOCABULARY_MULTIPLE = 128
"""Factor of vocabulary padding: Megatron pads to a multiple of this factor times the tensor-parallel size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiLatentAttention:
    """Multi-latent attention (DeepSeek), described by the widths of its low-rank projections."""

    q_lora_rank: int
    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """Transformer with experts, described by its sizes."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    vocab_size: int
    seq_length: int
    ffn_hidden_size: int = 0
    """Hidden size of the feed-forward part of dense layers."""
    num_experts: int = 0
    """Number of experts in a layer; 0: a dense model."""
    moe_router_topk: int = 1
    moe_ffn_hidden_size: int = 0
    """Hidden size of an expert."""
    moe_shared_expert_intermediate_size: int = 0
    """Sum of the hidden sizes of a layer's shared experts, which Megatron builds as one MLP."""
    moe_layer_freq: int = 1
    """Interval of layers with experts. 1: every layer has experts; 2: every second layer, beginning with the first."""
    dense_layers: int = 0
    """Number of layers at the beginning of the model that have no experts."""
    num_query_groups: int = 0
    """Number of query groups; 0: one group for each head."""
    kv_channels: int = 0
    """Number of channels of a head; 0: hidden size divided by heads."""
    swiglu: bool = True
    normalization: str = "RMSNorm"
    untie_embeddings_and_output_weights: bool = True
    multi_latent_attention: MultiLatentAttention | None = None

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size", "seq_length"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} {getattr(self, name)}; needs 1 or more")
        if self.num_experts and (self.moe_ffn_hidden_size < 1 or not 1 <= self.moe_router_topk <= self.num_experts):
            raise ConfigError(
                f"{self.num_experts} experts with moe_ffn_hidden_size {self.moe_ffn_hidden_size} and moe_router_topk "
                f"{self.moe_router_topk}; moe_ffn_hidden_size has to be 1 or more, and moe_router_topk has to be 1 to "
                f"{self.num_experts}"
            )
        if self.normalization not in ("RMSNorm", "LayerNorm"):
            raise ConfigError(f"normalization {self.normalization!r}; needs RMSNorm or LayerNorm")
        if not all(map(self.has_experts, range(self.num_layers))) and self.ffn_hidden_size < 1:
            raise ConfigError("some layers have no experts, so ffn_hidden_size is needed; give 1 or more")

    def has_experts(self, layer: int) -> bool:
        """Return True if a layer, counted from 0, is a mixture of experts."""
        return bool(self.num_experts) and layer >= self.dense_layers and layer % self.moe_layer_freq == 0

    @property
    def norm(self) -> tuple[TensorShape, ...]:
        """Tensors of a norm over the hidden size."""
        return (TensorShape(self.hidden_size),) * (2 if self.normalization == "LayerNorm" else 1)

    def mlp(self, width: int, tensor_parallel: int) -> tuple[TensorShape, ...]:
        """Return the tensors of two linear layers with an activation in between, on one rank."""
        inner = width // tensor_parallel
        return _linear(inner * (2 if self.swiglu else 1), self.hidden_size), _linear(self.hidden_size, inner)

    def attention(self, tensor_parallel: int) -> tuple[TensorShape, ...]:
        """Return the tensors of a layer's attention on one rank, with the norms of its low-rank projections."""
        heads, hidden = self.num_attention_heads, self.hidden_size
        if latent := self.multi_latent_attention:
            down_kv = latent.kv_lora_rank + latent.qk_pos_emb_head_dim
            up_q = heads * (latent.qk_head_dim + latent.qk_pos_emb_head_dim)
            return (
                _linear(hidden, heads * latent.v_head_dim // tensor_parallel),
                _linear(latent.q_lora_rank, hidden),
                _linear(up_q // tensor_parallel, latent.q_lora_rank),
                _linear(down_kv, hidden),
                _linear(heads * (latent.qk_head_dim + latent.v_head_dim) // tensor_parallel, latent.kv_lora_rank),
                TensorShape(latent.q_lora_rank),
                TensorShape(latent.kv_lora_rank),
            )
        channels = self.kv_channels or hidden // heads
        groups = self.num_query_groups or heads
        return (
            _linear(hidden, heads * channels // tensor_parallel),
            _linear(channels * (heads + 2 * groups) // tensor_parallel, hidden),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Layout of a model over ranks, and batch sizes."""

    ranks: int
    global_batch_size: int
    micro_batch_size: int = 1
    pipeline: int = 1
    tensor: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 0
    """Tensor-parallel size of experts; 0: the same as ``tensor``, the tensor-parallel size of all other layers."""
    chunks: int = 1
    """Number of virtual stages of each pipeline stage."""
    layers: tuple[int, ...] = ()
    """Number of layers of each stage, or of each chunk in the order of the model; empty to spread layers evenly."""
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        model = self.pipeline * self.tensor * self.context
        if min(self.ranks, self.pipeline, self.tensor, self.context, self.expert, self.chunks) < 1:
            raise ConfigError(f"{self}; every size has to be 1 or more")
        if self.ranks % model:
            raise ConfigError(
                f"{self.ranks} ranks with pipeline {self.pipeline}, tensor {self.tensor} and context {self.context}; "
                f"the number of ranks has to be a multiple of {model}"
            )
        experts = self.pipeline * self.expert * self.expert_tensor_size
        if self.ranks % experts:
            raise ConfigError(
                f"{self.ranks} ranks with pipeline {self.pipeline}, expert {self.expert} and expert tensor "
                f"{self.expert_tensor_size}; the number of ranks has to be a multiple of {experts}"
            )
        batch = self.micro_batch_size * self.data
        if self.global_batch_size < 1 or self.micro_batch_size < 1 or self.global_batch_size % batch:
            raise ConfigError(
                f"global batch {self.global_batch_size} of micro-batches of {self.micro_batch_size} on {self.data} "
                f"data-parallel ranks; the global batch has to be a multiple of {batch}"
            )

    @property
    def data(self) -> int:
        """Data-parallel size as Megatron counts it. Expert-parallel ranks count as data-parallel ranks."""
        return self.ranks // (self.pipeline * self.tensor * self.context)

    @property
    def expert_tensor_size(self) -> int:
        """Tensor-parallel size of experts."""
        return self.expert_tensor or self.tensor

    @property
    def expert_data(self) -> int:
        """Number of ranks with the same experts."""
        return self.ranks // (self.pipeline * self.expert * self.expert_tensor_size)

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches of an iteration on a data-parallel rank."""
        return self.global_batch_size // (self.micro_batch_size * self.data)


def describe(name: str, model: Transformer, layout: Layout, regime: Regime = MIXED) -> JobShape:
    """Return the shape of the job with this model and layout.

    Raises:
        ConfigError: the layout does not fit the model.
    """
    if model.num_experts % layout.expert:
        raise ConfigError(
            f"{model.num_experts} experts on {layout.expert} expert-parallel ranks; the number of experts has to be a "
            "multiple of the number of ranks"
        )
    tokens = layout.micro_batch_size * model.seq_length // layout.context
    sent = tokens // (layout.tensor if layout.sequence_parallel else 1)
    return JobShape(
        name=name,
        ranks=layout.ranks,
        tensor_parallel=layout.tensor,
        pipeline_parallel=layout.pipeline,
        expert_parallel=layout.expert,
        context_parallel=layout.context,
        data_parallel=layout.data,
        micro_batches=layout.micro_batches,
        boundary_bytes=sent * model.hidden_size * (4 if regime.compute == "fp32" else 2),
        regime=regime,
        stages=tuple(_stages(model, layout)),
        chunks=layout.chunks,
        tokens=tokens,
        experts_per_token=model.moe_router_topk if model.num_experts else 0,
        seq_length=model.seq_length,
        hidden_size=model.hidden_size,
    )


def _stages(model: Transformer, layout: Layout) -> Iterator[StageShape]:
    stages, chunks = layout.pipeline, layout.chunks
    counts = layout.layers or _evenly(model.num_layers, stages * chunks)
    if len(counts) not in (stages, stages * chunks) or sum(counts) != model.num_layers or min(counts) < 0:
        raise ConfigError(
            f"layers {list(counts)} for a model of {model.num_layers} layers on {stages} stages of {chunks} chunks; "
            "give one number for each stage, or one for each chunk; the sum has to be the number of layers"
        )
    if len(counts) == stages and chunks > 1:
        raise ConfigError(
            f"layers {list(counts)} for stages of {chunks} chunks; needs {stages * chunks} numbers, one for each chunk"
        )
    starts = [sum(counts[:number]) for number in range(len(counts))]
    for stage in range(stages):
        parts = range(stage, len(counts), stages)
        layers = [layer for part in parts for layer in range(starts[part], starts[part] + counts[part])]
        operators = tuple(_operators(model, layout, stage, layers))
        if not operators:
            raise ConfigError(f"stage {stage} has no operators; give fewer stages, or layers for this stage")
        sends = (2 * chunks - (stage == 0) - (stage == stages - 1)) if stages > 1 else 0
        yield StageShape(operators, sends)


def _evenly(layers: int, parts: int) -> tuple[int, ...]:
    """Return the number of layers of each part, as even as possible.

    Parts in the middle get the remainder, because embedding and head are at the ends.
    """
    share, remainder = divmod(layers, parts)
    first = (parts - remainder) // 2
    return tuple(share + (first <= part < first + remainder) for part in range(parts))


def _operators(model: Transformer, layout: Layout, stage: int, layers: list[int]) -> Iterator[OperatorShape]:
    """Yield the operators that the first rank of a stage holds, in Megatron's order."""
    dense, tensor = layout.data * layout.context, layout.tensor
    multiple = VOCABULARY_MULTIPLE * tensor
    elements = math.ceil(model.vocab_size / multiple) * multiple * model.hidden_size // tensor
    tied = not model.untie_embeddings_and_output_weights
    last = stage == layout.pipeline - 1
    if stage == 0:
        yield OperatorShape(EMBEDDING, OperatorKind.EMBEDDING, (TensorShape(elements),), dense)
    for layer in layers:
        yield from _layer(model, layout, layer)
    if last:
        # A tied output layer uses the weights of the embedding. The last stage holds a copy of them.
        yield OperatorShape(HEAD, OperatorKind.HEAD, model.norm + (() if tied else (TensorShape(elements),)), dense)
        if tied and stage > 0:
            yield OperatorShape(EMBEDDING, OperatorKind.EMBEDDING, (TensorShape(elements),), dense)


def _linear(rows: int, columns: int) -> TensorShape:
    return TensorShape(rows * columns, rows)


def _layer(model: Transformer, layout: Layout, layer: int) -> Iterator[OperatorShape]:
    dense, tensor = layout.data * layout.context, layout.tensor
    norms_and_attention = (*model.norm, *model.attention(tensor), *model.norm)
    if not model.has_experts(layer):
        mlp = model.mlp(model.ffn_hidden_size, tensor)
        if model.num_experts:
            name, kind = non_expert_name(layer), OperatorKind.NON_EXPERT
        else:
            name, kind = layer_name(layer), OperatorKind.LAYER
        yield OperatorShape(name, kind, norms_and_attention + mlp, dense)
        return
    width = model.moe_shared_expert_intermediate_size
    shared = model.mlp(width, tensor) if width else ()
    yield OperatorShape(non_expert_name(layer), OperatorKind.NON_EXPERT, norms_and_attention + shared, dense)
    gate = (TensorShape(model.num_experts * model.hidden_size),)
    yield OperatorShape(gate_name(layer), OperatorKind.GATE, gate, dense)
    expert = model.mlp(model.moe_ffn_hidden_size, layout.expert_tensor_size)
    for number in range(model.num_experts // layout.expert):
        yield OperatorShape(expert_name(layer, number), OperatorKind.EXPERT, expert, layout.expert_data)
