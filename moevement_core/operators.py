"""Operators, the units of snapshotting (MoEvement section 3.2), and the bytes of their state.

An operator is one expert of a layer, one gate, the rest of a layer (the non-expert), the embedding, or the head with
the final norm. In a model without experts a whole layer is one operator (appendix E).

A name gives the position of an operator in the *model*, never on a rank, so that all ranks use the same name:
``layers.3.experts.17``, ``layers.3.gate``, ``layers.3.non_expert``, ``layers.3``, ``embedding``, ``head``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from moevement_core.errors import OperatorError

Bytes = npt.NDArray[np.int64]


class OperatorKind(StrEnum):
    """Kind of an operator. Strategies may order experts by their numbers of tokens, but not the other kinds."""

    EXPERT = "expert"
    GATE = "gate"
    NON_EXPERT = "non_expert"
    LAYER = "layer"
    EMBEDDING = "embedding"
    HEAD = "head"


class SizedTensor(Protocol):
    """Interface of a tensor whose size is known; ``torch.Tensor`` has it."""

    def numel(self) -> int: ...  # noqa: D102

    def element_size(self) -> int: ...  # noqa: D102


def tensor_bytes(tensors: Iterable[SizedTensor]) -> int:
    """Return the total bytes of this rank's ``tensors``; callers pass scales of FP8 weights as separate tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of one operator's state on one rank, by part of the state.

    Raises:
        OperatorError: a size is negative or not a whole number, or the full state is smaller than the compute weights
            that are computed from it.
    """

    compute: int
    """Bytes of compute weights, which forward and backward read."""
    master: int
    """Bytes of master weights, which the optimizer updates. In FP32 training the compute weights are also the master
    weights, and count in both fields."""
    optimizer: int
    """Bytes of optimizer moments, with their scales and step counters."""
    gradient: int = 0
    """Bytes of the reduced gradient, from which the optimizer updates the operator; 0 for an untrained operator."""

    def __post_init__(self) -> None:
        for name in ("compute", "master", "optimizer", "gradient"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
                raise OperatorError(f"{name} state has {value!r} bytes; needs a whole number of 0 or more")
        if self.full < self.compute:
            raise OperatorError(
                f"full state of {self.full} bytes is smaller than the compute weights ({self.compute} bytes), which "
                "are computed from it; without optimizer state, count the compute weights also as master weights"
            )

    @property
    def full(self) -> int:
        """Bytes of full state: master weights and optimizer state."""
        return self.master + self.optimizer

    @classmethod
    def of_tensors(
        cls,
        compute: Iterable[SizedTensor],
        master: Iterable[SizedTensor],
        optimizer: Iterable[SizedTensor],
        gradient: Iterable[SizedTensor] = (),
    ) -> StateBytes:
        """Return the bytes of an operator's tensors; an untrained operator's full state is its compute weights."""
        compute_bytes, master_bytes, optimizer_bytes = (tensor_bytes(part) for part in (compute, master, optimizer))
        return cls(
            compute_bytes, max(master_bytes, compute_bytes - optimizer_bytes), optimizer_bytes, tensor_bytes(gradient)
        )


@dataclass(frozen=True, slots=True)
class Operator:
    """Operator of a model, the unit of snapshotting, with the bytes of its state on one rank."""

    name: str
    kind: OperatorKind
    state: StateBytes

    def __post_init__(self) -> None:
        if not self.name or not isinstance(self.name, str):
            raise OperatorError(f"name of an operator is {self.name!r}; needs a string that is not empty")
        if self.kind not in OperatorKind:
            raise OperatorError(
                f"operator {self.name} is of kind {self.kind!r}; needs one of {', '.join(OperatorKind)}"
            )


def expert_name(layer: int, expert: int) -> str:
    """Return the name of an expert of layer ``layer``; both numbers count from 0 in the model, not on a rank."""
    return f"layers.{layer}.experts.{expert}"


def gate_name(layer: int) -> str:
    """Return the name of the router of layer ``layer``."""
    return f"layers.{layer}.gate"


def non_expert_name(layer: int) -> str:
    """Return the name of the rest of layer ``layer``, in a model with experts."""
    return f"layers.{layer}.non_expert"


def layer_name(layer: int) -> str:
    """Return the name of the whole layer ``layer``, in a model without experts."""
    return f"layers.{layer}"


EMBEDDING = "embedding"
HEAD = "head"


class OperatorTable:
    """Table of the operators of one schedule, ordered by name, and so in the same order on every rank.

    The table describes a pipeline stage, with a row of bytes for each rank of the stage, or a single rank, with one
    row. All ranks of a stage share a schedule and save an operator in the same iteration of a window, because a stage
    replays as a whole. A row has zero bytes for operators that its rank does not hold.

    Numbers in names compare as numbers (``layers.2`` before ``layers.10``). If a strategy sorts operators by another
    criterion, operators that are equal by that criterion keep the order of the table.

    Args:
        operators: operators of a single rank, in any order.

    Raises:
        OperatorError: there is no operator, or a name occurs twice.
    """

    def __init__(self, operators: Iterable[Operator]) -> None:
        row = sorted(operators, key=lambda operator: _natural(operator.name))
        _refuse_duplicates(row)
        if not row:
            raise OperatorError("no operators; a schedule needs at least one")
        self.names: tuple[str, ...] = tuple(operator.name for operator in row)
        self.kinds: tuple[OperatorKind, ...] = tuple(operator.kind for operator in row)
        self.full: Bytes = _row(operator.state.full for operator in row)
        """Bytes of full state, int64 ``[ranks, operators]``."""
        self.compute: Bytes = _row(operator.state.compute for operator in row)
        """Bytes of compute weights, int64 ``[ranks, operators]``."""
        self.gradient: Bytes = _row(operator.state.gradient for operator in row)
        """Bytes of reduced gradients, int64 ``[ranks, operators]``."""

    @classmethod
    def of_ranks(cls, tables: Sequence[OperatorTable]) -> OperatorTable:
        """Return the table of a stage, in time linear in the entries of all tables.

        Args:
            tables: tables of the ranks of the stage, in the order of ranks.

        Raises:
            OperatorError: there is no table, or a name has two kinds.
        """
        kinds: dict[str, OperatorKind] = {}
        for names, own_kinds in dict.fromkeys((table.names, table.kinds) for table in tables):
            for name, kind in zip(names, own_kinds, strict=True):
                if kinds.setdefault(name, kind) != kind:
                    raise OperatorError(
                        f"operator {name} is {kinds[name]} on one rank and {kind} on another; it must have one kind"
                    )
        names = tuple(sorted(kinds, key=_natural))
        index_of = {name: index for index, name in enumerate(names)}
        columns = {table.names: [index_of[name] for name in table.names] for table in tables}

        def joined(part: str) -> Bytes:
            matrix = np.zeros((sum(len(table.full) for table in tables), len(names)), dtype=np.int64)
            first = 0
            for table in tables:
                rows = getattr(table, part)
                matrix[first : first + len(rows), columns[table.names]] = rows
                first += len(rows)
            return matrix

        kinds_of_names = tuple(kinds[name] for name in names)
        return cls.of_matrices(names, kinds_of_names, joined("full"), joined("compute"), joined("gradient"))

    @classmethod
    def of_matrices(
        cls, names: tuple[str, ...], kinds: tuple[OperatorKind, ...], full: Bytes, compute: Bytes, gradient: Bytes
    ) -> OperatorTable:
        """Return a table with the given names, kinds and arrays; the call makes the arrays read-only.

        Raises:
            OperatorError: the lengths or shapes do not match, or a name occurs twice.
        """
        shape = full.shape
        if not names or len(set(names)) < len(names) or len(kinds) != len(names) or shape[1:] != (len(names),):
            raise OperatorError(
                f"operator table has {len(names)} names, {len(kinds)} kinds and byte counts of shape {shape}; needs at "
                "least one name, no name twice, a kind for each name, and byte counts of shape (ranks, names)"
            )
        if not shape == compute.shape == gradient.shape:
            raise OperatorError(
                f"bytes of full state, compute weights and gradients have shapes {shape}, {compute.shape} and "
                f"{gradient.shape}; needs equal shapes"
            )
        table = cls.__new__(cls)
        table.names, table.kinds = names, kinds
        table.full, table.compute, table.gradient = full, compute, gradient
        for matrix in (full, compute, gradient):
            matrix.setflags(write=False)
        return table

    def with_gradients_for_compute(self) -> OperatorTable:
        """Return a copy of the table for a strategy that saves gradients instead of compute weights.

        In the copy, ``compute`` has the bytes of gradients, or the bytes of the operator's full state if these are
        fewer: the computation of windows requires that ``compute`` does not exceed ``full``.
        """
        table = copy(self)
        table.compute = np.minimum(self.gradient, self.full)
        return table

    @cached_property
    def index_of(self) -> Mapping[str, int]:
        """Index of each operator in :attr:`names`, by name."""
        return {name: index for index, name in enumerate(self.names)}

    @cached_property
    def is_expert(self) -> npt.NDArray[np.bool_]:
        """Array that is True for experts, bool ``[operators]``."""
        return np.fromiter((kind is OperatorKind.EXPERT for kind in self.kinds), dtype=bool, count=len(self))

    @cached_property
    def layers(self) -> npt.NDArray[np.int64]:
        """Layer of each operator, -1 outside layers, int64 ``[operators]``."""
        return np.fromiter((layer_of(name) for name in self.names), dtype=np.int64, count=len(self))

    @cached_property
    def depth(self) -> npt.NDArray[np.int64]:
        """Position of each operator between input and output of the model, int64 ``[operators]``.

        The embedding has -1, an operator of a layer has the layer's number, and the head has the largest position.
        """
        head = np.fromiter((kind is OperatorKind.HEAD for kind in self.kinds), dtype=bool, count=len(self))
        return np.where(head, self.layers.max(initial=0) + 1, self.layers)

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)


def layer_of(name: str) -> int:
    """Return the layer number in an operator's name; -1 if the operator belongs to no layer."""
    match = re.match(r"layers\.(\d+)", name)
    return int(match[1]) if match else -1


def _natural(name: str) -> tuple[tuple[bool, int, str], ...]:
    """Return a sort key that compares numbers in names as numbers, and that orders any two names."""
    parts = re.split(r"(\d+)", name)
    return tuple((part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts)


def _row(values: Iterable[int]) -> Bytes:
    row = np.array([list(values)], dtype=np.int64)
    row.setflags(write=False)
    return row


def _refuse_duplicates(operators: list[Operator]) -> None:
    seen: set[str] = set()
    for operator in operators:
        if operator.name in seen:
            raise OperatorError(f"operator {operator.name} occurs twice; every operator needs a different name")
        seen.add(operator.name)
