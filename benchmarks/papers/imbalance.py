"""Benchmark of one MoE layer under uneven loads of its experts, as in Lazarus's figure 10a. It writes papers/imbalance.md.

    python -m benchmarks.papers.imbalance

Two ranks with one thread each compute the layer on one core each, and exchange tokens with gloo's all-to-all. The
benchmark compares Megatron's layer, whose experts are on one rank each, with this project's layer with experts in slots,
whose replicas are allocated for the load. Routing is prescribed, so both layers compute the same. A load ratio of R:1
means that one expert gets R times as many tokens as with even loads (section 6.5.1). The machine must be idle.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.environment import measured_on
from benchmarks.lazarus_testbed import routed
from benchmarks.papers.common import table
from moevement_core.elastic.placement import slowest_node
from moevement_core.elastic.tables import StageExperts, Table, tables_of

OUTPUT = Path(__file__).with_suffix(".md")
RANKS = 2
RATIOS = (1, 2, 4, 8)
ROUNDS, WARM_UP = 15, 2
RUN_S = 3600.0
"""Longest time of a run, in seconds."""


class Kind(StrEnum):
    """MoE layers that the benchmark compares."""

    PLAIN = "plain"
    SLOTS = "slots"


@dataclass(frozen=True)
class Shape:
    """Sizes of the layer, those of the paper except for the tokens."""

    experts: int = 8
    hidden: int = 1024
    inner: int = 4096
    """Width of an expert between its two products."""
    tokens: int = 1024
    """Tokens of a rank."""
    slots: int = 6
    """Slots of a rank, c in Lazarus."""
    floor: int = 2
    """Least number of replicas of an expert, f in Lazarus, if there are enough slots."""


class Passes(NamedTuple):
    """Seconds of one repetition, until the last rank is done with each part."""

    forward: float
    backward: float
    reduction: float
    """Seconds of the sum of gradients over replicas; an expert of the plain layer has one copy in two ranks."""


Times = Mapping[tuple[int, Kind], Sequence[Passes]]
"""Repetitions by load ratio and layer."""


def main() -> None:
    """Measure all layers at all ratios, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"repetitions of each layer (default: {ROUNDS})")
    parser.add_argument("--tokens", type=int, default=Shape.tokens, help=f"tokens of a rank (default: {Shape.tokens})")
    arguments = parser.parse_args()
    from tests.harness import run_ranks

    os.environ.setdefault("MOEVEMENT_PLATFORM", "cpu")
    shape = Shape(tokens=arguments.tokens)
    first, *_ = run_ranks(measure, RANKS, shape, arguments.rounds, timeout_s=RUN_S)
    arguments.output.write_text(report(shape, first.result), encoding="utf-8")


def plain_table(shape: Shape) -> Table:
    """Return the experts of each rank under expert parallelism: a block of neighbours."""
    of_rank = shape.experts // RANKS
    return tuple(tuple(range(rank * of_rank, (rank + 1) * of_rank)) for rank in range(RANKS))


def slot_table(shape: Shape, ratio: float) -> Table:
    """Return the expert in each slot of each rank. All ranks are on one node, as in the benchmark."""
    stage = StageExperts(["node"] * RANKS, {0: routed(RANKS * shape.tokens, shape.experts, ratio)}, {})
    return tables_of(stage, (), shape.slots, shape.floor)[0]


def slowest(shape: Shape, ratio: float, kind: Kind) -> float:
    """Return the tokens of the most loaded rank over the mean of all ranks. Computing takes that many times as long."""
    experts = plain_table(shape) if kind is Kind.PLAIN else slot_table(shape, ratio)
    return slowest_node(np.array(routed(shape.tokens, shape.experts, ratio)), experts)


def measure(shape: Shape, rounds: int) -> Times:
    """Return the times of every layer at every ratio. All ranks call it; the layers alternate in each round."""
    pin_to_a_core()
    layers = {(ratio, kind): MeasuredLayer(shape, ratio, kind) for ratio in RATIOS for kind in Kind}
    times: dict[tuple[int, Kind], list[Passes]] = {case: [] for case in layers}
    for number in range(WARM_UP + rounds):
        for case, layer in layers.items():
            passes = layer.run()
            if number >= WARM_UP:
                times[case].append(passes)
    return times


def pin_to_a_core() -> None:
    """Give this rank a core of its own, if there are enough."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= dist.get_world_size():
        os.sched_setaffinity(0, {cores[dist.get_rank()]})


def in_groups() -> Any:
    """Return Megatron's process groups with all ranks in one expert-parallel group, made at the first call."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(expert_model_parallel_size=dist.get_world_size())
        tensor_parallel.model_parallel_cuda_manual_seed(1)
    return get_default_pg_collection()


class MeasuredLayer:
    """MoE layer of this rank with prescribed routing. All ranks make one and call its methods in the same order.

    Equal experts of different layers have equal weights, and layers of one shape get equal tokens.

    Args:
        shape: sizes of the layer.
        ratio: load ratio of the first expert.
        kind: layer of Megatron, or with experts in slots.
    """

    def __init__(self, shape: Shape, ratio: float, kind: Kind) -> None:
        from megatron.moevement.elastic.slots import Slots, use_slots

        self._slots = Slots(shape.experts, shape.slots, shape.floor, {0: slot_table(shape, ratio)})
        self.table = plain_table(shape) if kind is Kind.PLAIN else self._slots.tables[0]
        self.has_slots = kind is Kind.SLOTS
        use_slots(self._slots if self.has_slots else None)
        self.layer = _built(shape)
        use_slots(None)
        self.layer.set_layer_number(1)
        self.layer.router.use(_drawn_map(shape, ratio))
        for expert, parameters in zip(self.table[dist.get_rank()], self.parameters(), strict=True):
            _draw(parameters, seed=expert)
        self.tokens, self.gradient = torch.empty(2, shape.tokens, 1, shape.hidden).unbind()
        _draw([self.tokens, self.gradient], seed=1000 + dist.get_rank())
        self.tokens.requires_grad_()

    def parameters(self) -> list[list[Any]]:
        """Return the parameters of each of this rank's experts."""
        return [list(expert.parameters()) for expert in self.layer.experts.local_experts]

    def run(self) -> Passes:
        """Compute the layer forward and backward, sum gradients over replicas, and return the seconds of each part."""
        self.forget_gradients()
        times = [_now()]
        output, _ = self.layer(self.tokens)
        times.append(_now())
        output.backward(self.gradient)
        times.append(_now())
        self.reduce()
        times.append(_now())
        return Passes(*(after - before for before, after in itertools.pairwise(times)))

    def forget_gradients(self) -> None:
        """Delete all gradients, so that the next pass makes new ones."""
        for tensor in (self.tokens, *self.layer.parameters()):
            tensor.grad = None

    def reduce(self) -> None:
        """Sum the gradients of experts over their replicas, as the project does in training."""
        from megatron.moevement.elastic.replicas import reduce_gradients
        from megatron.moevement.elastic.slots import use_slots

        if not self.has_slots:
            return
        for parameter in self.layer.parameters():
            parameter.main_grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        use_slots(self._slots)
        reduce_gradients([self.layer])
        use_slots(None)


def _built(shape: Shape) -> Any:
    """Return Megatron's layer, or the layer with slots if this process uses slots; its router does as it is told."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=1, hidden_size=shape.hidden, ffn_hidden_size=shape.inner, num_attention_heads=1,
        num_moe_experts=shape.experts, moe_ffn_hidden_size=shape.inner, moe_router_topk=1, add_bias_linear=False,
        expert_model_parallel_size=dist.get_world_size(), moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none", moe_router_pre_softmax=True, use_cpu_initialization=True,
    )  # fmt: skip
    build: Any = get_moe_module_spec(use_te=False, num_experts=shape.experts)
    submodules = build.keywords["submodules"]
    submodules.router = PrescribedRouter
    return build(config, pg_collection=in_groups())


class PrescribedRouter(torch.nn.Module):
    """Router that sends tokens where it is told, with probability 1."""

    def __init__(self, config: Any = None, **others: Any) -> None:
        super().__init__()
        self.map = torch.empty(0)

    def use(self, routing_map: torch.Tensor) -> None:
        """Route by this map from now on, bool ``[T, E]``."""
        self.map = routing_map

    def set_layer_number(self, layer_number: int) -> None:
        """Do nothing: the layer announces its number, and prescribed routing does not need it."""

    def forward(self, hidden_states: torch.Tensor, padding_mask: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return probabilities ``[T, E]`` and the routing map ``[T, E]``."""
        return self.map.to(hidden_states.dtype), self.map


def _drawn_map(shape: Shape, ratio: float) -> torch.Tensor:
    """Return the routing of this rank's tokens in random order, bool ``[T, E]``."""
    counts = torch.tensor(routed(shape.tokens, shape.experts, ratio))
    experts = torch.repeat_interleave(torch.arange(shape.experts), counts)
    order = torch.randperm(shape.tokens, generator=torch.Generator().manual_seed(dist.get_rank()))
    return torch.nn.functional.one_hot(experts[order], shape.experts).bool()


@torch.no_grad()
def _draw(tensors: Sequence[torch.Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors:
        tensor.normal_(0.0, 0.02, generator=generator)


def _now() -> float:
    """Return the time when all ranks are here."""
    dist.barrier()
    return time.perf_counter()


HEADER = (
    "load ratio", "layer", "most loaded rank over the mean", "forward, ms", "tokens/s", "of 1:1", "with backward, ms",
    "of 1:1", "gradients of replicas, ms", "plain over slots, forward", "with backward", "with gradients of replicas",
)  # fmt: skip


def rows(shape: Shape, times: Times) -> Iterator[list[str]]:
    """Yield a row for each ratio and layer, with medians."""

    def seconds(case: tuple[int, Kind], *parts: str) -> float:
        return statistics.median(sum(getattr(passes, part) for part in parts) for passes in times[case])

    both = ("forward", "backward")
    for ratio, kind in times:
        case, even, plain = (ratio, kind), (min(case[0] for case in times), kind), (ratio, Kind.PLAIN)
        over = [
            f"{seconds(plain, *parts) / seconds(case, *parts):.2f}" if kind is Kind.SLOTS else ""
            for parts in (("forward",), both, Passes._fields)
        ]
        yield [
            f"{ratio}:1", kind, f"{slowest(shape, ratio, kind):.2f}", f"{seconds(case, 'forward') * 1e3:.0f}",
            f"{RANKS * shape.tokens / seconds(case, 'forward'):,.0f}",
            f"{seconds(even, 'forward') / seconds(case, 'forward'):.2f}", f"{seconds(case, *both) * 1e3:.0f}",
            f"{seconds(even, *both) / seconds(case, *both):.2f}",
            f"{seconds(case, 'reduction') * 1e3:.0f}" if kind is Kind.SLOTS else "", *over,
        ]  # fmt: skip


def report(shape: Shape, times: Times) -> str:
    """Return the text of the page."""
    rounds = len(next(iter(times.values())))
    return f"""# One MoE layer under uneven loads

    python -m benchmarks.papers.imbalance        (writes this file)

Lazarus's figure 10a, on CPUs: {RANKS} ranks with one thread each, on a core of their own, compute one MoE layer of {shape.experts} experts, with
{shape.hidden} and {shape.inner} features and {shape.tokens} tokens a rank, in FP32. Tokens cross ranks in gloo's all-to-all. Routing is prescribed: at R:1,
one expert gets R times as many tokens as with even loads. Medians of {rounds} rounds; layers and ratios alternate in each round.

- **plain**: Megatron's layer with expert parallelism. Each rank has {shape.experts // RANKS} experts.
- **slots**: this project's layer. Each rank has {shape.slots} slots, and experts have replicas by load, placed for two ranks of one node.

*of 1:1* is the throughput as a share of the same layer's with even loads. All ranks wait for the most loaded one; the third
column has its tokens. *gradients of replicas* is the sum of gradients over an expert's replicas, which training adds in each iteration
whatever the number of micro-batches. The plain layer has no replicas here; in a larger job, data parallelism reduces its gradients.

{table(HEADER, rows(shape, times))}

The paper measures the forward pass on GPUs: with slots the throughput is constant over load ratios, expert parallelism becomes
dramatically slower, and slots cost a little when loads are even. It prints no numbers.

{measured_on("torch", "megatron-core")}.
"""


if __name__ == "__main__":
    main()
