"""Description of a training job for planning and simulation: operators of each stage, and boundary tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from moevement_core.errors import ConfigError
from moevement_core.operators import Operator, OperatorKind, OperatorTable, StateBytes
from moevement_core.precision import Regime, TensorShape


@dataclass(frozen=True, slots=True)
class OperatorShape:
    """Shape of an operator on one rank, without the division of its optimizer state among data-parallel ranks."""

    name: str
    kind: OperatorKind
    tensors: tuple[TensorShape, ...]
    """Parameters of the operator on this rank. With tensor parallelism, they are only the rank's part."""
    shards: int
    """Number of ranks that hold the same parameters and divide the optimizer state among each other.

    It is the data-parallel times the context-parallel size; for experts it is the expert-data-parallel size.
    """

    @property
    def parameters(self) -> int:
        """Number of elements in all tensors."""
        return sum(tensor.elements for tensor in self.tensors)


class TensorPart(NamedTuple):
    """Part of one tensor: those elements whose optimizer state is on one rank."""

    operator: int
    """Index of the operator in its stage."""
    tensor: int
    """Index of the tensor in its operator."""
    elements: int


@dataclass(frozen=True, slots=True)
class StageShape:
    """Shape of a pipeline stage. All ranks hold the same number of experts, so one rank describes all."""

    operators: tuple[OperatorShape, ...]
    sends_per_micro_batch: int
    """Number of tensors that a rank sends to neighbouring stages for each micro-batch, in the forward and backward
    passes of all its chunks together."""
    ranks: Mapping[bool, tuple[tuple[TensorPart, ...], ...]] = field(default_factory=dict)
    """Parts of tensors of which each rank holds the optimizer state, in the order of ranks. The key True is for jobs
    that keep weights in FP8: these weights have separate buffers, which changes the parts. The key False is for all
    other jobs. Only Megatron can compute the parts; without Megatron the mapping is empty."""
    _tables: dict[tuple[Regime, int], OperatorTable] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Cache of operator tables by number formats and expert-parallel size, because many plans of a job need the same
    table. The tables of :meth:`table` are stored under size 0."""

    def table(self, regime: Regime) -> OperatorTable:
        """Return the operator table of one rank, if the ranks that hold the same operator divide its state evenly."""
        if (regime, 0) not in self._tables:
            self._tables[regime, 0] = OperatorTable(
                Operator(shape.name, shape.kind, regime.state_bytes(shape.tensors, shape.shards))
                for shape in self.operators
            )
        return self._tables[regime, 0]

    def tables_of_ranks(self, regime: Regime, expert_parallel: int) -> OperatorTable:
        """Return the operator table of the stage, with a row of bytes for each of its ranks, as in a live job.

        If :attr:`ranks` is empty, the table has a row for each expert-parallel rank, and ranks that hold the same
        operator divide its state evenly.
        """
        if (regime, expert_parallel) not in self._tables:
            self._tables[regime, expert_parallel] = OperatorTable.of_ranks(
                [OperatorTable(row) for row in self._rows(regime, expert_parallel)]
            )
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
                    regime.part_bytes(
                        (tensor, own.get((place, number), 0)) for number, tensor in enumerate(shape.tensors)
                    )
                    if parts
                    else even[place]
                )
                row.append(Operator(name, shape.kind, state))
            rows.append(row)
        return rows

    def rank_bytes(self, regime: Regime) -> list[StateBytes]:
        """Return the exact bytes of state that each rank of the stage saves; an empty list if ``ranks`` is empty."""
        return [self._sum(parts, regime) for parts in self.ranks.get(regime.keeps_fp8, ())]

    def _sum(self, parts: tuple[TensorPart, ...], regime: Regime) -> StateBytes:
        own = {(part.operator, part.tensor): part.elements for part in parts}
        weighed = [
            regime.part_bytes((tensor, own.get((operator, place), 0)) for place, tensor in enumerate(shape.tensors))
            for operator, shape in enumerate(self.operators)
        ]
        fields = ("compute", "master", "optimizer", "gradient")
        return StateBytes(*(sum(getattr(state, name) for state in weighed) for name in fields))


@dataclass(frozen=True, slots=True)
class JobShape:
    """Shape of a job: its model and its parallel layout."""

    name: str
    ranks: int
    tensor_parallel: int
    pipeline_parallel: int
    expert_parallel: int
    context_parallel: int
    data_parallel: int
    """Data-parallel size as Megatron counts it: ranks / (tensor x pipeline x context). Expert-parallel ranks count as
    data-parallel ranks."""
    micro_batches: int
    """Number of micro-batches of an iteration on each data-parallel rank."""
    boundary_bytes: int
    """Bytes of one tensor that a rank sends to a neighbouring stage."""
    regime: Regime
    """Formats of weights, gradients and optimizer state, as the job's flags set them."""
    stages: tuple[StageShape, ...]
    chunks: int = 1
    """Number of virtual stages of each stage."""
    tokens: int = 0
    """Number of tokens of a micro-batch on a rank. With context parallelism, a rank has a part of each sequence."""
    experts_per_token: int = 0
    """Number of experts that a router chooses for a token (top-k); 0 without experts."""
    seq_length: int = 0
    hidden_size: int = 0

    def __post_init__(self) -> None:
        if len(self.stages) != self.pipeline_parallel:
            raise ConfigError(
                f"the job has {len(self.stages)} stages and pipeline size {self.pipeline_parallel}; both numbers must "
                "be equal"
            )

    @property
    def ranks_of_stage(self) -> int:
        """Number of ranks of a pipeline stage."""
        return self.ranks // self.pipeline_parallel

    @property
    def tied_stages(self) -> frozenset[int]:
        """Stages that hold copies of the same embedding; empty if only one stage holds it.

        Training sums the gradient of the embedding over these stages, so the stages roll back together.
        """
        holds = [any(operator.kind is OperatorKind.EMBEDDING for operator in stage.operators) for stage in self.stages]
        return frozenset(stage for stage, is_held in enumerate(holds) if is_held) if sum(holds) > 1 else frozenset()

    @property
    def layout(self) -> str:
        """Sizes of the parallel dimensions above 1, in the usual notation, such as ``PP2 DP4``."""
        parts = {
            "PP": self.pipeline_parallel, "TP": self.tensor_parallel, "CP": self.context_parallel,
            "EP": self.expert_parallel, "DP": self.data_parallel,
        }  # fmt: skip
        return " ".join(f"{name}{size}" for name, size in parts.items() if size > 1) or "one rank"

    def log_bytes_of(self, stage: StageShape) -> int:
        """Return the bytes of boundary tensors that a rank of ``stage`` logs per iteration (MoEvement section 3.4)."""
        return stage.sends_per_micro_batch * self.micro_batches * self.boundary_bytes
