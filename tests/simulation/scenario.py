"""Random scenarios, determined by a seed: the job, its nodes and network, and its faults."""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache

from moevement_core.trainer.config import SessionConfig, add_session_flags
from tests.simulation.trainer import Pace, Shape


class Kind(StrEnum):
    """Kind of fault that may happen in a simulation."""

    KILL = "kill"
    """End of a process at once; its supervisor and its peers notice."""
    NODE = "node"
    """Loss of all processes of a node; other nodes see their connections break."""
    POWER = "power"
    """Loss of all processes of a node, whose connections fall silent instead of breaking."""
    HANG = "hang"
    """Hang of a process for a while."""
    CUT = "cut"
    """Partition: a node reaches no other host for a while."""
    SUPERVISOR = "supervisor"
    """End of a supervisor with its processes; another supervisor starts later."""
    PAUSE = "pause"
    """Pause of the coordinator for a while."""
    SLOW = "slow"
    """Delay of all messages that channels of a node send or receive, for a while."""
    CLOCK = "clock"
    """Jump of the wall clock; the monotonic clock does not jump."""
    COORDINATOR = "coordinator"
    """End of the coordinator's process; its host refuses connections from then on."""
    DARK = "dark"
    """Loss of the coordinator's host, in silence."""
    PARTED = "parted"
    """Partition: the coordinator's host reaches no other host for a while."""
    DRAIN = "drain"
    """Request to drain the node of a rank, taken back after a while."""
    MOVE = "move"
    """Request to drain a rank."""


OF_COORDINATOR = (Kind.COORDINATOR, Kind.DARK, Kind.PARTED)
"""Faults of the coordinator that strike once a standby may take over."""
MOVES = (Kind.DRAIN, Kind.MOVE)
"""Planned moves, which are no faults: they alone make no rank repeat an iteration."""


@dataclass(frozen=True)
class Fault:
    """Fault of one kind, with its time, target and duration."""

    kind: Kind
    at_iteration: int | None
    """Iteration whose first commit triggers this fault; None if the previous fault triggers it."""
    after_s: float
    """Seconds from the trigger to the fault."""
    target: int
    """Rank that fails, or whose node fails."""
    for_s: float
    """Seconds until the fault ends by itself, or until a lost node boots; for CLOCK, the seconds of the jump."""


@dataclass(frozen=True)
class Scenario:
    """Job, cluster and faults of one simulation."""

    shape: Shape
    iterations: int
    nodes: int
    processes: int
    """Processes on each node, spares among them."""
    lease_s: float
    spare_timeout_s: float
    flags: tuple[str, ...]
    pace: Pace
    slowest_s: float
    drop: float
    beside_s: float
    """Longest additional delay of a message that a channel sends, in seconds. It holds for all nodes at all times."""
    slow_answers_s: float
    """Longest pause of the coordinator between two looks at its connections, in seconds."""
    start_s: float
    """Longest time that a process takes to start, in seconds."""
    faults: tuple[Fault, ...]

    @property
    def spares(self) -> int:
        return self.nodes * self.processes - self.shape.ranks

    @property
    def config(self) -> SessionConfig:
        return config_of(self.flags)

    def __str__(self) -> str:
        faults = "; ".join(
            f"{fault.kind} of {fault.target} "
            + (f"at iteration {fault.at_iteration}" if fault.at_iteration is not None else "then")
            + f" +{fault.after_s:.2f} s for {fault.for_s:.1f} s"
            for fault in self.faults
        )
        return (
            f"{self.shape.stages} stages x {self.shape.replicas} replicas, {self.iterations} iterations, "
            f"{self.nodes} nodes of {self.processes} processes, lease {self.lease_s:g} s, {' '.join(self.flags)}; "
            f"{faults or 'no faults'}"
        )


@cache
def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    add_session_flags(parser)
    return parser


@cache
def config_of(flags: tuple[str, ...]) -> SessionConfig:
    """Return the configuration of a session with these flags."""
    return SessionConfig.from_args(_parser().parse_args(flags), has_experts=True)


def draw(seed: int) -> Scenario:
    """Return the scenario of a seed."""
    rng = random.Random(f"scenario {seed}")
    nodes, processes = rng.choice([(2, 1), (2, 2), (3, 1), (3, 1), (3, 2), (4, 1)])
    total = nodes * processes
    shapes = [(s, r) for s in (1, 2, 3) for r in (1, 2, 3) if 2 <= s * r <= min(total, 4)]
    stages, replicas = rng.choice(shapes)
    shape = Shape(stages, replicas, rng.randint(2, 4))
    lease_s = rng.choice([2.0, 3.0, 5.0])
    iterations = rng.randint(8, 15)
    return Scenario(
        shape, iterations, nodes, processes, lease_s, rng.choice([3.0, 10.0, 30.0]),
        _flags(rng, shape, processes), Pace(rng.choice([0.05, 0.2]), rng.choice([0.001, 0.05, 0.4])),
        rng.choice([0.002, 0.02, 0.05]), rng.choice([0.0, 0.0, 0.02]), rng.choice([0.0, 0.0, 0.0, 0.2, 1.0]),
        rng.choice([0.0, 0.0, 0.0, 0.3]),
        rng.choice([0.2, 2.0]),
        _with_coordinator(seed, _faults(rng, shape, iterations, lease_s), iterations, lease_s),
    )  # fmt: skip


def _flags(rng: random.Random, shape: Shape, processes: int) -> tuple[str, ...]:
    window = rng.randint(1, min(3, shape.operators))
    flags = [
        "--moevement-host-memory-gb", "1", "--moevement-window", str(window),
        "--moevement-window-kind", rng.choice(["aligned", "rolling"]),
        "--moevement-verify", rng.choice(["nothing", "window"]),
    ]  # fmt: skip
    flags += ["--moevement-recovery", rng.choice(["replay", "replay", "redo"])]
    used = -(-shape.ranks // processes)
    if used >= 3 and rng.random() < 0.25:
        flags += ["--moevement-protection", f"parity:{used - 1}+1"]
    else:
        flags += ["--moevement-keep-own", rng.choice(["always", "never", "auto"])]
        if rng.random() < 0.3:
            flags += ["--moevement-replicas-on-same-node"]
    return tuple(flags)


def _faults(rng: random.Random, shape: Shape, iterations: int, lease_s: float) -> tuple[Fault, ...]:
    faults, target = list[Fault](), rng.randrange(shape.ranks)
    for number in range(rng.choice([1, 1, 2, 2, 3, 4])):
        kind = rng.choices(
            [kind for kind in Kind if kind not in (*OF_COORDINATOR, *MOVES)], [8, 3, 2, 3, 3, 1, 1, 2, 1]
        )[0]  # fmt: skip
        is_next = number > 0 and rng.random() < 0.6
        if rng.random() < 0.7:
            target = rng.randrange(shape.ranks)
        faults.append(
            Fault(
                kind, None if is_next else rng.randint(0, iterations - 1),
                rng.uniform(0.0, rng.choice([0.0, 0.1, 1.0, 3 * lease_s])), target,
                rng.uniform(0.1, rng.choice([0.5, 1.0, 4.0]) * lease_s) if kind is not Kind.CLOCK
                else rng.choice([-3600.0, 3600.0]),
            )
        )  # fmt: skip
    return tuple(faults)


def with_moves(scenario: Scenario, seed: int, *, alone: bool = False) -> Scenario:
    """Return the scenario with planned moves between its faults, or with moves ``alone``."""
    rng = random.Random(f"moves {seed}")
    mixed = [] if alone else [*scenario.faults]
    for _ in range(rng.choice([1, 1, 2, 3])):
        move = Fault(
            rng.choice(MOVES), rng.choice([None, rng.randint(1, scenario.iterations - 2)]),
            rng.uniform(0.0, rng.choice([0.0, 0.1, 1.0])), rng.randrange(scenario.shape.ranks),
            rng.uniform(0.1, 4.0 * scenario.lease_s),
        )  # fmt: skip
        mixed.insert(rng.randint(0, len(mixed)), move)
    return replace(scenario, faults=tuple(mixed))


def _with_coordinator(seed: int, faults: tuple[Fault, ...], iterations: int, lease_s: float) -> tuple[Fault, ...]:
    """Return the faults with some of the coordinator between them, in half of all scenarios."""
    rng, mixed = random.Random(f"coordinator {seed}"), [*faults]
    for _ in range(rng.choice([0, 0, 1, 1, 2, 3])):
        fault = Fault(
            rng.choice([*OF_COORDINATOR, Kind.PAUSE]), rng.choice([None, rng.randint(0, iterations - 1)]),
            rng.uniform(0.0, rng.choice([0.0, 0.1, 1.0])), 0, rng.uniform(0.1, 4.0 * lease_s),
        )  # fmt: skip
        mixed.insert(rng.randint(0, len(mixed)), fault)
    return tuple(mixed)
