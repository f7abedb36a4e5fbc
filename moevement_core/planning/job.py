"""A training job as planning and simulation see it: the operators of each stage, and what crosses stage boundaries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from moevement_core.errors import ConfigError
from moevement_core.operators import Operator, OperatorKind, OperatorTable, StateBytes
from moevement_core.precision import Regime, TensorShape


@dataclass(frozen=True, slots=True)
class OperatorShape:
    """Operator of one rank before it is cut over data parallelism."""

    name: str
    kind: OperatorKind
    tensors: tuple[TensorShape, ...]
    """Parameters on this rank (after tensor parallelism)."""
    shards: int
    """Ranks with the same parameters, over which its state is cut: data times context parallelism, or expert data
    parallelism."""

    @property
    def parameters(self) -> int:
        """Elements of all its tensors."""
        return sum(tensor.elements for tensor in self.tensors)


class Part(NamedTuple):
    """Elements of one tensor that are one rank's."""

    operator: int
    """Position among the operators of the stage."""
    tensor: int
    """Position among the tensors of the operator."""
    elements: int


@dataclass(frozen=True, slots=True)
class StageShape:
    """Pipeline stage; its ranks differ in which experts they hold and not in how many, so one stands for all."""

    operators: tuple[OperatorShape, ...]
    sends_per_micro_batch: int
    """Tensors that a rank sends over a stage boundary for each micro-batch, forward and backward, all chunks."""
    ranks: Mapping[bool, tuple[tuple[Part, ...], ...]] = field(default_factory=dict)
    """Parts that each rank owns, in order, by whether weights are kept in FP8, which have buffers of their own. Empty
    where only Megatron could say it.
    """
    _tables: dict[tuple[Regime, int], OperatorTable] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Tables of its ranks that were made, which many plans of one job ask for."""

    def table(self, regime: Regime) -> OperatorTable:
        """The operators of one rank, each cut evenly over the ranks that share it."""
        if (regime, 0) not in self._tables:
            self._tables[regime, 0] = OperatorTable(
                Operator(shape.name, shape.kind, regime.state_bytes(shape.tensors, shape.shards))
                for shape in self.operators
            )
        return self._tables[regime, 0]

    def tables_of_ranks(self, regime: Regime, expert_parallel: int) -> OperatorTable:
        """The operators of the stage with a row for each of its ranks, as a live job has them.

        Where nobody knows what each rank owns there is a row for each expert-parallel rank, with state cut evenly.
        """
        if (regime, expert_parallel) not in self._tables:
            self._tables[regime, expert_parallel] = OperatorTable(ranks=self._rows(regime, expert_parallel))
        return self._tables[regime, expert_parallel]

    def _rows(self, regime: Regime, expert_parallel: int) -> list[list[Operator]]:
        shapes, parts = self.operators, self.ranks.get(regime.keeps_fp8, ())
        even = [] if parts else [regime.state_bytes(shape.tensors, shape.shards) for shape in shapes]
        local: dict[str, int] = {}
        for shape in shapes:
            layer = shape.name.rpartition(".")[0]
            local[layer] = local.get(layer, 0) + (shape.kind is OperatorKind.EXPERT)
        replicas = next((shape.shards for shape in shapes if shape.kind is OperatorKind.EXPERT), 1)
        expert_tensor_parallel = max(1, len(parts) // (expert_parallel * replicas))
        rows = []
        for rank in range(len(parts) or expert_parallel):
            own = {(part.operator, part.tensor): part.elements for part in parts[rank]} if parts else {}
            first = (rank // expert_tensor_parallel) % expert_parallel
            row = []
            for place, shape in enumerate(shapes):
                name, (layer, _, number) = shape.name, shape.name.rpartition(".")
                if shape.kind is OperatorKind.EXPERT:
                    name = f"{layer}.{first * local[layer] + int(number)}"
                state = (
                    regime.part_bytes((tensor, own.get((place, at), 0)) for at, tensor in enumerate(shape.tensors))
                    if parts
                    else even[place]
                )
                row.append(Operator(name, shape.kind, state))
            rows.append(row)
        return rows

    def rank_bytes(self, regime: Regime) -> list[StateBytes]:
        """Return the bytes of state that each rank of the stage saves, exactly; empty where it is not known what a rank
        owns.
        """
        return [self._sum(parts, regime) for parts in self.ranks.get(regime.keeps_fp8, ())]

    def _sum(self, parts: tuple[Part, ...], regime: Regime) -> StateBytes:
        own = {(part.operator, part.tensor): part.elements for part in parts}
        weighed = [
            regime.part_bytes((tensor, own.get((operator, place), 0)) for place, tensor in enumerate(shape.tensors))
            for operator, shape in enumerate(self.operators)
        ]
        fields = ("compute", "master", "optimizer", "gradient")
        return StateBytes(*(sum(getattr(state, name) for state in weighed) for name in fields))


@dataclass(frozen=True, slots=True)
class JobShape:
    """A job: model and parallel layout."""

    name: str
    ranks: int
    tensor_parallel: int
    pipeline_parallel: int
    expert_parallel: int
    context_parallel: int
    data_parallel: int
    """Megatron's: ranks / (tensor x pipeline x context), so experts are inside it."""
    micro_batches: int
    """Micro-batches of an iteration on each data-parallel rank."""
    boundary_bytes: int
    """Bytes of one tensor that a rank sends over a stage boundary."""
    regime: Regime
    """The formats that the job's own flags ask for."""
    stages: tuple[StageShape, ...]
    chunks: int = 1
    """Virtual stages of a stage."""
    tokens: int = 0
    """Tokens of a micro-batch on a rank, after context parallelism."""
    experts_per_token: int = 0
    """Top-k of the routers; 0 without experts."""
    seq_length: int = 0
    hidden_size: int = 0

    def __post_init__(self) -> None:
        if len(self.stages) != self.pipeline_parallel:
            raise ConfigError(f"{len(self.stages)} stages for pipeline size {self.pipeline_parallel}; needs one each")

    @property
    def tied_stages(self) -> frozenset[int]:
        """Stages with copies of one embedding, whose gradient is a sum over all of them: they roll back together."""
        holds = [any(operator.kind is OperatorKind.EMBEDDING for operator in stage.operators) for stage in self.stages]
        return frozenset(stage for stage, it_does in enumerate(holds) if it_does) if sum(holds) > 1 else frozenset()

    @property
    def layout(self) -> str:
        """Sizes of the parallel dimensions, in the words of the field."""
        parts = {
            "PP": self.pipeline_parallel, "TP": self.tensor_parallel, "CP": self.context_parallel,
            "EP": self.expert_parallel, "DP": self.data_parallel,
        }  # fmt: skip
        return " ".join(f"{name}{size}" for name, size in parts.items() if size > 1) or "one rank"

    def log_bytes_of(self, stage: StageShape) -> int:
        """Bytes of boundary tensors that a rank of ``stage`` logs in an iteration (MoEvement section 3.4)."""
        return stage.sends_per_micro_batch * self.micro_batches * self.boundary_bytes
