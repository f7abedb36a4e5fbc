"""Trainer whose weights are one integer per operator. Each update mixes in all values that it depends on.

So two states are equal only if their histories are equal. A gradient from a stale weight, a missing or repeated
update, or the record of another iteration changes all later integers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

import moevement_core as ft
from moevement_core.recovery.boundary_log import Direction
from moevement_core.recovery.feed import Feeding, Feeds
from tests.simulation.modules import world


def mix(*values: int) -> int:
    """Return a number that depends on all values and on their order."""
    return hash(values)


@dataclass(frozen=True)
class Shape:
    """Shape of a job. Ranks count through data-parallel replicas first, then through stages."""

    stages: int
    replicas: int
    operators: int
    """Number of operators of each stage."""

    @property
    def ranks(self) -> int:
        return self.stages * self.replicas

    def place(self, rank: int) -> tuple[int, int]:
        """Return the stage and the replica of a rank."""
        return rank // self.replicas, rank % self.replicas

    def rank(self, stage: int, replica: int) -> int:
        return stage * self.replicas + replica

    def stage(self, stage: int) -> list[int]:
        return [self.rank(stage, replica) for replica in range(self.replicas)]

    def names(self) -> list[str]:
        return [ft.expert_name(0, number) for number in range(self.operators)]


def first_master(rank: int, operator: int) -> int:
    return mix(rank, operator, 17)


def compute_of(master: int) -> int:
    return mix(master, 5)


def batch(iteration: int, replica: int) -> int:
    return mix(iteration, replica, 3)


# Pure functions of a step, which the failure-free job, training and replays share


def local_of(iteration: int, computes: Sequence[Sequence[int]]) -> int:
    """Return a number that depends on the compute weights of all ranks of a stage."""
    return mix(iteration, *(weight for of_rank in computes for weight in of_rank))


def forward(iteration: int, activation: int, local: int) -> int:
    return mix(iteration, activation, local, 7)


def backward(iteration: int, gradient: int, local: int, activation: int) -> int:
    return mix(iteration, gradient, local, activation, 11)


def share_of(activation: int, gradient: int) -> int:
    """Return a replica's part of the gradient, before the sum over replicas."""
    return mix(activation, gradient)


def gradient_of(rank: int, operator: int, local: int, shares: Sequence[int]) -> int:
    return mix(rank, operator, local, *shares)


def norm_of(gradients: Sequence[Sequence[int]]) -> int:
    return mix(*(mix(*of_rank) for of_rank in gradients))


def updated(master: int, gradient: int, norm: int) -> int:
    return mix(master, gradient, norm)


@lru_cache(maxsize=64)
def failure_free(shape: Shape, iterations: int) -> list[list[tuple[int, ...]]]:
    """Return the masters of every rank after every iteration of a job without failures."""
    masters = [[first_master(rank, operator) for operator in range(shape.operators)] for rank in range(shape.ranks)]
    history = [[tuple(row) for row in masters]]
    for iteration in range(1, iterations + 1):
        computes = [[compute_of(master) for master in of_rank] for of_rank in masters]
        local = [local_of(iteration, [computes[r] for r in shape.stage(s)]) for s in range(shape.stages)]
        shares = [[0] * shape.replicas for _ in range(shape.stages)]
        for replica in range(shape.replicas):
            inputs, value = [], batch(iteration, replica)
            for stage in range(shape.stages):
                inputs.append(value)
                value = forward(iteration, value, local[stage])
            for stage in reversed(range(shape.stages)):
                shares[stage][replica] = share_of(inputs[stage], value)
                value = backward(iteration, value, local[stage], inputs[stage])
        gradients = [
            [gradient_of(rank, operator, local[shape.place(rank)[0]], shares[shape.place(rank)[0]])
             for operator in range(shape.operators)]
            for rank in range(shape.ranks)
        ]  # fmt: skip
        norm = norm_of(gradients)
        masters = [
            [updated(m, g, norm) for m, g in zip(*both, strict=True)] for both in zip(masters, gradients, strict=True)
        ]
        history.append([tuple(row) for row in masters])
    return history


@dataclass(frozen=True)
class Pace:
    """Durations of the parts of an iteration, in seconds."""

    compute_s: float = 0.1
    update_s: float = 0.01


class Trainer(ft.Binding):
    """Binding of one simulated rank.

    Args:
        shape: shape of the job.
        pace: durations of the parts of an iteration.
    """

    def __init__(self, shape: Shape, pace: Pace) -> None:
        self.shape, self.pace = shape, pace
        self.process: Any = world().current().process
        self.rank = self.process.rank
        self.stage, self.replica = shape.place(self.rank)
        count = shape.operators
        self.masters = torch.tensor([first_master(self.rank, operator) for operator in range(count)])
        self.compute = torch.tensor([compute_of(master) for master in self.masters.tolist()])
        self.gradients = torch.zeros(count, dtype=torch.int64)
        self.live: list[int | None] = [None] * count
        """Gradients of the current iteration, by operator; None for operators that have none."""
        self.places = {name: place for place, name in enumerate(shape.names())}
        self.frozen: frozenset[int] = frozenset()
        self.is_replaying = False

    # A step

    def run(self, iteration: int, frozen: frozenset[str] = frozenset(), feeds: Feeds | None = None) -> None:
        """Compute the gradients of ``iteration``. Neighbouring stages or, in a replay, ``feeds`` provide the inputs."""
        shape = self.shape
        self.frozen = frozenset(self.places[name] for name in frozen)
        computes = self._gather("compute", shape.stage(self.stage), self.compute.tolist())
        local = local_of(iteration, computes)
        world().sleep(self.pace.compute_s * world().rng.uniform(0.5, 1.5))
        activation = batch(iteration, self.replica) if self.stage == 0 else self._from(-1, iteration, feeds)
        if self.stage + 1 < shape.stages:
            self._to(+1, iteration, forward(iteration, activation, local), feeds)
            gradient = self._from(+1, iteration, feeds)
        else:
            gradient = forward(iteration, activation, local)
        if self.stage > 0:
            self._to(-1, iteration, backward(iteration, gradient, local, activation), feeds)
        shares = self._gather("share", shape.stage(self.stage), share_of(activation, gradient))
        for operator in range(shape.operators):
            self.live[operator] = None if operator in self.frozen else gradient_of(self.rank, operator, local, shares)

    def _gather(self, kind: Any, ranks: Sequence[int], value: Any) -> list[Any]:
        return world().exchanges.gather(kind, ranks, value)

    def _pair(self, step: int) -> list[int]:
        return sorted((self.rank, self.shape.rank(self.stage + step, self.replica)))

    def _to(self, step: int, iteration: int, value: int, feeds: Feeds | None) -> None:
        direction = Direction.FORWARD if step > 0 else Direction.BACKWARD
        if self.boundary_log is not None:
            self.boundary_log.note(direction, torch.tensor([value]))
        if feeds is None or (feeds.after if step > 0 else feeds.before) is None:
            self._gather(("pipeline", step), self._pair(step), value)

    def _from(self, step: int, iteration: int, feeds: Feeds | None) -> int:
        if feeds is not None and (feed := feeds.after if step > 0 else feeds.before) is not None:
            return int(feed.next())
        pair = self._pair(step)
        return int(self._gather(("pipeline", -step), pair, None)[pair.index(self.rank) ^ 1])

    def reduce(self) -> dict[str, Any]:
        gradients = [gradient for gradient in self.live if gradient is not None]
        return {"norm": norm_of(self._gather("norm", range(self.shape.ranks), gradients))}

    def update(self, outcome: Mapping[str, Any]) -> None:
        world().sleep(self.pace.update_s)
        for operator, gradient in enumerate(self.live):
            if gradient is not None:
                self._apply(operator, gradient, outcome["norm"])
        self.live = [None] * self.shape.operators
        world().checks.updated(self)

    def _apply(self, operator: int, gradient: int, norm: int) -> None:
        master = updated(int(self.masters[operator]), gradient, norm)
        self.masters[operator], self.gradients[operator] = master, gradient
        self.compute[operator] = compute_of(master)

    # Description of this rank

    def place(self) -> ft.Place:
        shape = self.shape
        pipeline = tuple(shape.rank(stage, self.replica) for stage in range(shape.stages)) if shape.stages > 1 else ()
        return ft.Place(
            stage=self.stage, replica=shape.rank(0, self.replica), same_state=shape.rank(self.stage, 0),
            pipeline=pipeline,
        )  # fmt: skip

    def operators(self) -> list[ft.Operator]:
        weights = ft.StateBytes(compute=8, master=8, optimizer=0, gradient=8)
        return [ft.Operator(name, ft.OperatorKind.EXPERT, weights) for name in self.shape.names()]

    def states(self) -> dict[str, ft.OperatorState]:
        def tensor(name: str, saved: ft.Saved, values: torch.Tensor, index: int) -> tuple[ft.StateTensor, ...]:
            return (ft.StateTensor(name, saved, "value", values[index : index + 1]),)

        return {
            name: ft.OperatorState(
                tensor(name, ft.Saved.COMPUTE, self.compute, index), tensor(name, ft.Saved.FULL, self.masters, index),
                tensor(name, ft.Saved.GRADIENT, self.gradients, index),
            )
            for index, name in enumerate(self.shape.names())
        }  # fmt: skip

    def boundary(self) -> dict[str, Any]:
        return {"progress": {"iteration": self.iteration}}

    def put_boundary(self, boundary: Mapping[str, Any]) -> None:
        self.put_progress(boundary["progress"])

    @property
    def sent_bytes(self) -> int:
        return 64 if self.shape.stages > 1 else 0

    def stages_are_tied_by(self) -> str | None:
        return None

    # After a failure

    def clear_gradients(self) -> None:
        self.live = [None] * self.shape.operators

    def gradients_left(self) -> list[str]:
        return [str(operator) for operator, gradient in enumerate(self.live) if gradient is not None]

    def gather_replicas(self) -> None:
        """Do nothing, as every rank saves all of its state."""

    def redo(self, gradients: Mapping[str, Sequence[tuple[str, torch.Tensor]]], outcome: Mapping[str, Any]) -> None:
        for name, tensors in gradients.items():
            for _, gradient in tensors:
                self._apply(self.places[name], int(gradient), outcome["norm"])

    @contextmanager
    def replaying(self, shared_from: int | None, feeding: Feeding | None) -> Iterator[ft.Trainer]:
        self.is_replaying = True
        try:
            yield Replay(self, feeding.feeds() if feeding is not None else None)
        finally:
            self.is_replaying = False
            self.frozen = frozenset()


class Replay(ft.Trainer):
    """Replay of iterations on a simulated rank."""

    def __init__(self, trainer: Trainer, feeds: Feeds | None) -> None:
        self.trainer, self.feeds = trainer, feeds
        self.frozen = frozenset[str]()
        self.step_outcome: Any = None

    def load(self, snapshot: ft.Snapshot, loads: Mapping[str, ft.Saved], *, is_shared: bool = True) -> None:
        trainer = self.trainer
        for entry, tensor in snapshot.tensors_of(loads):
            place = trainer.places[entry.operator]
            if entry.saved is ft.Saved.FULL:
                trainer.masters[place] = int(tensor)
                trainer.compute[place] = compute_of(int(tensor))
            else:
                trainer.compute[place] = int(tensor)

    def redo(self, iteration: int, gradients: Mapping[str, Sequence[tuple[str, torch.Tensor]]], outcome: Any) -> None:
        self.trainer.redo(gradients, outcome["step"])

    def gather_replicas(self) -> None:
        self.trainer.gather_replicas()

    def put_boundary(self, boundary: Any) -> None:
        self.trainer.put_boundary(boundary)

    def freeze(self, iteration: int, frozen: frozenset[str]) -> None:
        self.frozen = frozen

    def run(self, iteration: int, outcome: Mapping[str, Any] | None) -> Mapping[str, Any]:
        trainer = self.trainer
        if self.feeds is not None:
            self.feeds.begin(iteration)
        if trainer.boundary_log is not None:
            trainer.boundary_log.begin(iteration)
        trainer.run(iteration, self.frozen, self.feeds)
        if trainer.boundary_log is not None:
            trainer.boundary_log.end()
        self.step_outcome = outcome["step"] if outcome is not None else trainer.reduce()
        trainer.update(self.step_outcome)
        trainer.iteration = iteration
        return {}

    def record(self) -> Mapping[str, Any]:
        return {"step": self.step_outcome}

    def sent(self, iteration: int) -> str | None:
        log = self.trainer.boundary_log
        return log.digest(iteration) if log is not None else None
