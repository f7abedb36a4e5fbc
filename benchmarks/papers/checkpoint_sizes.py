"""Computation of MoC-System's checkpoint sizes (its sections 6.2.1 and 6.2.2): all ranks, and the bottleneck rank.

The cases are those of the paper's table 2: GPT-350M-16E under ZeRO-2, so optimizer states are divided over ranks anyway,
and only weights can be shared out in different ways.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from benchmarks.papers.common import table
from moevement_core.operators import Bytes, Operator, OperatorKind, OperatorTable, StateBytes, expert_name
from moevement_core.planning.sharding import adaptive_sharding, equal_sharding, expert_bytes
from moevement_core.planning.transformer import VOCABULARY_MULTIPLE, Transformer
from moevement_core.precision import TensorShape

GB = 1e9
WEIGHT, MASTER, MOMENTS = 2, 4, 8
"""Bytes of a parameter in FP16 weights, FP32 master weights and Adam's moments."""
SNAPSHOT_BYTES_PER_S = 1 * GB
"""Bandwidth from an A800 to its host that section 6.2.4 of the paper states."""
EXPERTS_SAVED = (16, 8, 4, 2, 1)
TOTALS = {(True, True): 0.423, (True, False): 0.88, (False, True): 0.54}
"""Published size of a checkpoint with one expert of each layer, as a share of a full one (section 6.2.1 and table 3), by
two choices: if weights are left out, and if optimizer state is."""


class Sharding(StrEnum):
    """Division of weights over data-parallel ranks."""

    BASELINE = "baseline"
    """Sharding of Megatron-DeepSpeed: rank 0 saves non-experts, and the first expert-parallel group saves experts."""
    EXPERTS = "experts"
    """Equal sharding of experts over the expert-parallel groups (section 4.1)."""
    EQUAL = "equal"
    """Equal sharding of experts and non-experts (section 4.2)."""
    ADAPTIVE = "adaptive"
    """Equal sharding of experts, and adaptive sharding of non-experts (section 4.3)."""


@dataclass(frozen=True)
class Case:
    """Case of the paper's table 2."""

    name: str
    data: int
    """Data-parallel size, which is the number of ranks."""
    expert: int
    """Expert-parallel size."""

    @property
    def groups(self) -> int:
        """Number of expert-parallel groups, each with all experts."""
        return self.data // self.expert


CASES = (Case("Case 1", 8, 8), Case("Case 2", 16, 16), Case("Case 3", 16, 8))
GPT_350M_16E = Transformer(
    num_layers=24, hidden_size=1024, num_attention_heads=16, vocab_size=50257, seq_length=2048, ffn_hidden_size=4096,
    num_experts=16, moe_ffn_hidden_size=4096, moe_layer_freq=2, swiglu=False, normalization="LayerNorm",
    untie_embeddings_and_output_weights=False,
)  # fmt: skip
"""Model of the paper's table 1. Its vocabulary is not published; this is GPT-2's."""


def non_expert_modules(model: Transformer) -> list[int]:
    """Return the parameters of each non-expert module: embedding, attention, feed-forward part or gate, last norm."""
    rows = -(-model.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    modules = [rows * model.hidden_size]
    for layer in range(model.num_layers):
        gate = (TensorShape(model.num_experts * model.hidden_size),)
        rest = gate if model.has_experts(layer) else model.mlp(model.ffn_hidden_size, 1)
        modules += [_parameters(model.norm + model.attention(1)), _parameters(model.norm + rest)]
    return [*modules, _parameters(model.norm)]


def expert_layers(model: Transformer) -> list[int]:
    """Return the layers with experts."""
    return [layer for layer in range(model.num_layers) if model.has_experts(layer)]


def expert_parameters(model: Transformer) -> int:
    """Return the parameters of one expert."""
    return _parameters(model.mlp(model.moe_ffn_hidden_size, 1))


def all_expert_parameters(model: Transformer) -> int:
    """Return the parameters of all experts of the model."""
    return model.num_experts * len(expert_layers(model)) * expert_parameters(model)


def expert_table(model: Transformer, expert_parallel: int) -> OperatorTable:
    """Return the experts of the model, with a row for each expert-parallel rank and a byte for each parameter."""
    each, state = model.num_experts // expert_parallel, StateBytes(0, expert_parameters(model), 0)
    return OperatorTable.of_ranks(
        [
            OperatorTable(
                Operator(expert_name(layer, expert), OperatorKind.EXPERT, state)
                for layer in expert_layers(model)
                for expert in range(rank * each, (rank + 1) * each)
            )
            for rank in range(expert_parallel)
        ]
    )


def rank_bytes(case: Case, experts: int, sharding: Sharding, *, keeps_masters: bool = True) -> Bytes:
    """Return the bytes that each rank saves in each checkpoint, int64 ``[turns, ranks]``.

    Args:
        case: parallel layout.
        experts: K, number of experts of each layer in a checkpoint.
        sharding: division of weights over ranks.
        keeps_masters: True if master weights of all experts are in each checkpoint.
    """
    model = GPT_350M_16E
    modules = non_expert_modules(model)
    all_experts = all_expert_parameters(model)
    # Parameters of the checkpoint's experts on each rank. All expert-parallel groups hold the same.
    chosen = np.tile(expert_bytes(expert_table(model, case.expert), experts), (1, case.groups))
    optimizer = (MASTER + MOMENTS) * sum(modules) // case.data + (MASTER * all_experts // case.data) * keeps_masters
    saved: Bytes = optimizer + chosen * (MOMENTS if keeps_masters else MASTER + MOMENTS) // case.groups
    if sharding is Sharding.BASELINE:
        saved[:, : case.expert] += WEIGHT * chosen[:, : case.expert]
    else:
        saved += WEIGHT * chosen // case.groups
    weights = [WEIGHT * module for module in modules]
    if sharding is Sharding.EQUAL:
        return equal_sharding(weights, saved)
    if sharding is Sharding.ADAPTIVE:
        return adaptive_sharding(weights, saved)
    saved[:, 0] += sum(weights)
    return saved


def total_share(experts: int, *, weights: bool = True, optimizer: bool = True, masters: bool = False) -> float:
    """Return the size of a checkpoint with K experts of each layer, as a share of a full one (equation 6).

    Args:
        experts: K.
        weights: True if the checkpoint leaves out weights of experts.
        optimizer: True if the checkpoint leaves out moments of experts.
        masters: True if the checkpoint leaves out master weights of experts.
    """
    model = GPT_350M_16E
    all_experts = all_expert_parameters(model)
    everything = (WEIGHT + MASTER + MOMENTS) * (all_experts + sum(non_expert_modules(model)))
    of_expert = WEIGHT * weights + MOMENTS * optimizer + MASTER * masters
    return 1 - all_experts * of_expert * (1 - experts / model.num_experts) / everything


def section() -> str:
    """Return the text about checkpoint sizes."""
    model = GPT_350M_16E
    parameters = sum(non_expert_modules(model)) + all_expert_parameters(model)
    shares = [
        [" and ".join(["weights"] * weights + ["moments"] * optimizer), f"{share:.1%}",
         f"{total_share(1, weights=weights, optimizer=optimizer):.1%}"]
        for (weights, optimizer), share in TOTALS.items()
    ]  # fmt: skip
    header = (
        "", "K", "all ranks, GB", *(f"{sharding}, GB" for sharding in Sharding), "equal below baseline",
        "adaptive below equal",
    )  # fmt: skip
    shorter = [
        1 - rank_bytes(case, 1, Sharding.ADAPTIVE).max() / rank_bytes(case, 16, Sharding.BASELINE).max()
        for case in CASES
    ]
    hidden_s = rank_bytes(CASES[1], 16, Sharding.BASELINE).max() / SNAPSHOT_BYTES_PER_S
    four_s = rank_bytes(CASES[2], 4, Sharding.ADAPTIVE).max() / SNAPSHOT_BYTES_PER_S
    return f"""## Checkpoint sizes (sections 6.2.1 to 6.2.3)

GPT-350M-16E of the paper's table 1, with {parameters / 1e9:.2f} G parameters (published: 1.7 G). **Total**, with one of 16 experts of each layer,
as a share of a full checkpoint:

{table(("left out of the other experts", "published", "here"), shares)}

So it seems that the paper's checkpoints hold the FP32 master weights of all experts, which the paper does not say: without them,
equation 6 gives {total_share(1, masters=True):.1%}.

**Bottleneck rank**: the heaviest rank of the heaviest checkpoint, for the layouts of table 2 under ZeRO-2, which divides optimizer
state evenly. Only weights can be shared out. *baseline*: rank 0 saves weights of non-experts, and the first expert-parallel group
those of experts. *experts*: equal sharding of experts. *equal*: of non-experts as well. *adaptive*: non-experts by the experts of
each checkpoint. A module (attention, feed-forward part, embedding) is not divided. The copy from an A800 to its host has {SNAPSHOT_BYTES_PER_S / GB:g} GB/s
in section 6.2.4, so a number of GB is also the seconds of a snapshot.

{table(header, _rows(EXPERTS_SAVED, keeps_masters=True))}

The same without the master weights of the other experts, as in equation 6:

{table(header, _rows((1,), keeps_masters=False))}

Published, for a K that is missing in our copy of the text: equal sharding takes 12% to 28% off a full checkpoint and 22% to 29% off a
partial one, and adaptive sharding another 3.7% to 6.1%. Full checkpoints and case 1 come close. The embedding is larger than a rank's
even part of the non-experts, by most in cases 2 and 3, so the result depends on how the embedding is divided. That is not published.

**Times.** The paper says that checkpoints take up to about half the time (6.2.2). The snapshot with one expert and adaptive sharding is
{min(shorter):.0%} to {max(shorter):.0%} shorter here than the baseline's full one; writing to storage, whose bandwidth is not published, is left out. What the
paper says of passes does not fit 1 GB/s. In case 2 passes hide the baseline's full snapshot, so they take {hidden_s:.1f} s or more. Those of
case 3 are half a second shorter, but hide only less than four experts, and those of four take {four_s:.1f} s. So seconds of passes and
of asynchronous checkpoints (6.2.3) are not computed."""


def _rows(counts: tuple[int, ...], *, keeps_masters: bool) -> list[list[str]]:
    rows = []
    for case in CASES:
        for experts in counts:
            ranks = {
                sharding: rank_bytes(case, experts, sharding, keeps_masters=keeps_masters) for sharding in Sharding
            }
            heaviest = {sharding: int(saved.max()) for sharding, saved in ranks.items()}
            equal = 1 - heaviest[Sharding.EQUAL] / heaviest[Sharding.BASELINE]
            adaptive = 1 - heaviest[Sharding.ADAPTIVE] / heaviest[Sharding.EQUAL]
            is_full = experts == GPT_350M_16E.num_experts
            rows.append(
                [case.name, "all" if is_full else str(experts),
                 f"{ranks[Sharding.BASELINE].sum(axis=1).mean() / GB:.2f}",
                 *(f"{nbytes / GB:.3f}" for nbytes in heaviest.values()),
                 f"{equal:.1%}", f"{adaptive:.1%}"]
            )  # fmt: skip
    return rows


def _parameters(tensors: tuple[TensorShape, ...]) -> int:
    return sum(tensor.elements for tensor in tensors)
