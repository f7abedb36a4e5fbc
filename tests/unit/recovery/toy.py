"""Job without Megatron. Each operator has a few numbers, whose updates depend on all weights, as in a model.

Its floating-point results are reproducible, so a replay that computes something else ends with different bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, override

import numpy as np
import torch

from moevement_core.comms import plain
from moevement_core.engine.layout import OperatorState, tensors_of
from moevement_core.operators import Operator, OperatorKind, OperatorTable, StateBytes, expert_name
from moevement_core.policy.schedule import Saved, Schedule, ScheduleHistory
from moevement_core.policy.window import WindowKind, impose_window
from moevement_core.recovery.replay import Trainer
from moevement_core.snapshot.buffer import Buffer
from moevement_core.snapshot.snapshot import (
    BOUNDARY,
    Entry,
    Header,
    Snapshot,
    StateTensor,
    as_bytes,
    contents_text,
    digest_of,
    offsets,
)
from moevement_core.snapshot.whole import begin_whole
from moevement_core.strategies import SparseSchedule

OPERATORS, NUMBERS = 7, 5


class Toy(Trainer):
    """Job with half-precision weights, FP32 masters and momenta, and a random state that every iteration advances."""

    def __init__(self, size: int, kind: WindowKind) -> None:
        self.names = [expert_name(0, index) for index in range(OPERATORS)]
        generator = torch.Generator().manual_seed(1)
        self.masters = {name: torch.randn(NUMBERS, generator=generator) for name in self.names}
        self.momenta = {name: torch.zeros(NUMBERS) for name in self.names}
        self.weights = {name: master.half() for name, master in self.masters.items()}
        self.gradients = {name: torch.full((NUMBERS,), float("nan")) for name in self.names}
        """Clipped gradients of the last update."""
        self.redone: list[tuple[int, int]] = []
        """Iterations whose update was re-executed, each with its number of updated operators."""
        self.kind = kind
        self.rng, self.norm, self.frozen = 12345, 0.0, frozenset[str]()
        self.ran: list[tuple[int, int]] = []
        """Executed iterations, each with its number of frozen operators."""
        self.weights_of_frozen_moved = False
        table = OperatorTable(Operator(n, OperatorKind.EXPERT, StateBytes(2, 4, 4, 4)) for n in self.names)
        order = np.arange(OPERATORS)
        self.history = ScheduleHistory(
            SparseSchedule(table, order, impose_window(table, order, size, kind), start=-size)
        )

    def states(self) -> dict[str, OperatorState]:
        return {
            name: OperatorState(
                (StateTensor(name, Saved.COMPUTE, "weight", self.weights[name]),),
                (
                    StateTensor(name, Saved.FULL, "master", self.masters[name]),
                    StateTensor(name, Saved.FULL, "momentum", self.momenta[name]),
                ),
                (StateTensor(name, Saved.GRADIENT, "gradient", self.gradients[name]),),
            )
            for name in self.names
        }

    def whole(self) -> dict[str, str]:
        return begin_whole({n: [t.tensor for t in (*s.compute, *s.full)] for n, s in self.states().items()})()

    # One iteration, in training and in a replay

    def step(self, iteration: int, norm: float | None) -> float:
        self.rng = (self.rng * 1103515245 + iteration) % 2**31
        terms = [weights.float() * (index + 1) for index, weights in enumerate(self.weights.values())]
        activations = torch.stack(terms).sum(0)
        noise = (self.rng % 1000) / 1000
        gradients = {name: torch.tanh(activations * noise + self.weights[name].float()) for name in self.names}
        active = [name for name in self.names if name not in self.frozen]
        if norm is None:
            norm = float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
        for name in active:
            self.gradients[name].copy_(gradients[name] / (norm + 1e-6))
            self.update(name)
        self.norm = norm
        return float(activations.sum())

    def update(self, name: str) -> None:
        self.momenta[name].mul_(0.9).add_(self.gradients[name])
        self.masters[name].sub_(0.1 * self.momenta[name])
        self.weights[name].copy_(self.masters[name])

    # Interface that the replay calls

    @override
    def load(self, snapshot: Snapshot, loads: Mapping[str, Saved], *, is_shared: bool = True) -> None:
        live = {(t.operator, t.key): t.tensor for s in self.states().values() for t in (*s.compute, *s.full)}
        for entry, tensor in snapshot.tensors_of(loads):
            live[entry.operator, entry.key].copy_(tensor)
        for name, saved in loads.items():
            if saved is Saved.FULL:
                self.weights[name].copy_(self.masters[name])

    @override
    def redo(self, iteration: int, gradients: Mapping[str, Sequence[tuple[str, torch.Tensor]]], outcome: Any) -> None:
        self.redone.append((iteration, len(gradients)))
        for name, parts in gradients.items():
            for _, gradient in parts:
                self.gradients[name].copy_(gradient)
            self.update(name)

    @override
    def gather_replicas(self) -> None:
        pass

    @override
    def put_boundary(self, boundary: Any) -> None:
        self.rng = boundary["rng"]

    @override
    def freeze(self, iteration: int, frozen: frozenset[str]) -> None:
        self.frozen = frozen

    @override
    def run(self, iteration: int, outcome: Mapping[str, Any] | None) -> Mapping[str, Any]:
        self.ran.append((iteration, len(self.frozen)))
        before = {name: self.weights[name].clone() for name in self.frozen}
        loss = self.step(iteration, outcome["norm"] if outcome else None)
        self.weights_of_frozen_moved |= any(not torch.equal(self.weights[name], before[name]) for name in before)
        return {"loss": torch.tensor(loss)}

    # Snapshots, and the loss of the state

    def snapshot(self, iteration: int, state: int, outcome: dict[str, Any], *, whole: bool = True) -> Snapshot:
        schedule = self.history.at(iteration)
        contents = self.history.contents(iteration)
        assert contents is not None
        marked, tensors = plain.flatten({"boundary": {"rng": self.rng}, "iteration": outcome})
        held = [*tensors_of(schedule, contents, self.states())]
        held += [StateTensor(BOUNDARY, Saved.FULL, str(number), t) for number, t in enumerate(tensors)]
        buffer, entries = torch.zeros(1 << 13, dtype=torch.uint8), []
        for tensor, at in offsets(held):
            piece = buffer[at : at + tensor.nbytes]
            piece.copy_(as_bytes(tensor.tensor))
            dtype = str(tensor.tensor.dtype).removeprefix("torch.")
            entries.append(Entry(tensor.operator, tensor.saved, tensor.key, dtype, at, tensor.nbytes, digest_of(piece)))
        header = Header(
            0, iteration, schedule.id, schedule.slot(iteration), contents_text(contents), tuple(entries), marked, state,
            self.whole() if whole else None,
        )  # fmt: skip
        return Snapshot(header, Buffer(buffer))

    def wipe(self) -> None:
        for tensors in (self.weights, self.masters, self.momenta, self.gradients):
            for tensor in tensors.values():
                tensor.fill_(float("nan"))
        self.rng = -1


def run_until(
    toy: Toy, iterations: int, change_at: Mapping[int, tuple[np.ndarray, int] | Schedule]
) -> dict[int, Snapshot]:
    """Run the job and return its snapshots up to ``iterations - 1``; ``change_at`` changes orders and windows."""
    table, kind = toy.history.newest.table, toy.kind
    first = toy.history.newest.start
    snapshots = {iteration: toy.snapshot(iteration, 0, {}) for iteration in range(first, 0)}
    outcome: dict[str, Any] = {}
    for iteration in range(iterations):
        if (change := change_at.get(iteration)) is not None:
            if not isinstance(change, Schedule):
                order, size = change
                change = SparseSchedule(table, order, impose_window(table, order, size, kind))
            toy.history.change(iteration - 1, change)
        if toy.history.contents(iteration) is not None:
            snapshots[iteration] = toy.snapshot(iteration, iteration, outcome)
        loss = toy.step(iteration + 1, None)
        outcome = {"norm": toy.norm, "losses": {"loss": torch.tensor(loss)}}
    return snapshots
