"""Simulated collectives: all ranks must join, each learns the result at its own time, and a rank may die meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tests.simulation.modules import Waiting, world
from tests.simulation.world import Process, World

LATE, LATE_S = 0.03, 0.6
"""Share of results that reach a rank later than the others, and the longest such delay in seconds."""


class Exchange:
    """Collective operation among some ranks, with the values that they contributed."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self.values: dict[int, Any] = {}
        self.processes: dict[int, Process] = {}
        self.waiting: dict[int, Waiting] = {rank: Waiting() for rank in ranks}
        self.learned: set[int] = set()
        self.failed: set[int] = set()


class Handle:
    """Handle by which one rank waits for an exchange."""

    def __init__(self, exchange: Exchange, rank: int) -> None:
        self._exchange, self._rank = exchange, rank

    def wait(self) -> list[Any]:
        """Block until the exchange ends; return the values of all ranks, in the order of its ranks.

        Raises:
            RuntimeError: a rank of the exchange is gone.
        """
        exchange, rank = self._exchange, self._rank
        exchange.waiting[rank].until(lambda: rank in exchange.learned or rank in exchange.failed)
        if rank not in exchange.learned:
            raise RuntimeError("Connection closed by peer")
        return [exchange.values[peer] for peer in exchange.ranks]


class Exchanges:
    """Exchanges of one simulation that are still open."""

    def __init__(self, simulation: World) -> None:
        self.world = simulation
        self._open: dict[Any, Exchange] = {}
        self._gone: dict[int, set[int]] = {}

    def start(self, kind: Any, ranks: Sequence[int], value: Any) -> Handle:
        """Join an exchange that every one of ``ranks`` joins; return a handle to wait for its result."""
        process = self.world.current().process
        assert process.generation is not None
        generation, rank = process.generation.roster.generation, process.rank
        key = (generation, kind, tuple(ranks))
        count = process.exchanged.get(key, 0)
        process.exchanged[key] = count + 1
        exchange = self._open.get((key, count))
        if exchange is None:
            exchange = self._open[key, count] = Exchange(ranks)
        exchange.values[rank], exchange.processes[rank] = value, process
        if self._is_broken(exchange, generation):
            self._fail_soon(exchange)
        elif len(exchange.values) == len(exchange.ranks):
            del self._open[key, count]
            for peer in exchange.ranks:
                self._finish_soon(exchange, peer, generation)
        return Handle(exchange, rank)

    def gather(self, kind: Any, ranks: Sequence[int], value: Any) -> list[Any]:
        """Join an exchange, wait for it, and return the values of all ranks."""
        return self.start(kind, ranks, value).wait()

    def leave(self, generation: int, rank: int) -> None:
        """Break the connections of a rank, so that exchanges with it soon fail on the ranks that wait."""
        self._gone.setdefault(generation, set()).add(rank)
        for (key, _), exchange in list(self._open.items()):
            if key[0] == generation and rank in exchange.ranks:
                self._fail_soon(exchange)

    def _is_broken(self, exchange: Exchange, generation: int) -> bool:
        return bool(self._gone.get(generation, set()) & set(exchange.ranks))

    def _fail_soon(self, exchange: Exchange) -> None:
        for rank in exchange.values:
            self.world.after(self.world.rng.uniform(0.0, 0.1), partial(self._fail, exchange, rank))

    def _fail(self, exchange: Exchange, rank: int) -> None:
        if rank not in exchange.learned:
            exchange.failed.add(rank)
            exchange.waiting[rank].wake_all()

    def _finish_soon(self, exchange: Exchange, rank: int, generation: int) -> None:
        network = self.world.network
        node = exchange.processes[rank].node
        slowest = max((network.delay_s(process.node, node) for process in exchange.processes.values()), default=0.0)
        if self.world.rng.random() < LATE:
            slowest += self.world.rng.uniform(0.0, LATE_S)
        self.world.after(slowest, partial(self._finish, exchange, rank, generation))

    def _finish(self, exchange: Exchange, rank: int, generation: int) -> None:
        network = self.world.network
        node = exchange.processes[rank].node
        lost = [process for process in exchange.processes.values() if not process.is_alive]
        if (lost or self._is_broken(exchange, generation)) and self.world.rng.random() < 0.5:
            if self._is_broken(exchange, generation):
                self._fail(exchange, rank)
            return
        if not all(network.reaches(process.node, node) for process in exchange.processes.values()):
            self.world.after(0.3, partial(self._finish, exchange, rank, generation))  # sent again until it arrives
            return
        exchange.learned.add(rank)
        exchange.waiting[rank].wake_all()


class Work:
    def __init__(self, handle: Handle, then: Callable[[list[Any]], None]) -> None:
        self._handle, self._then = handle, then

    def wait(self) -> None:
        self._then(self._handle.wait())


class Group:
    """Process group of some ranks."""

    def __init__(self, number: int, ranks: Sequence[int]) -> None:
        self.number, self.ranks = number, tuple(ranks)


def distributed(exchanges: Exchanges) -> list[tuple[Any, str, Any]]:
    """Return the replacements for functions of ``torch.distributed``: module, name and stand-in."""

    def current() -> Any:
        return world().current().process

    def all_ranks() -> range:
        return range(current().world_size)

    def get_rank(group: Any = None) -> int:
        return int(current().rank)

    def get_world_size(group: Any = None) -> int:
        return int(current().world_size)

    def init_process_group(*_: Any, **__: Any) -> None:
        current().groups_made = 0
        exchanges.gather("init", all_ranks(), None)

    def new_group(ranks: Sequence[int] | None = None, **_: Any) -> Group:
        current().groups_made += 1
        return Group(current().groups_made, all_ranks() if ranks is None else ranks)

    def ranks_of(group: Group | None) -> tuple[Any, Sequence[int]]:
        return ("group", group.number if group else 0), group.ranks if group else all_ranks()

    def all_gather_into_tensor(out: torch.Tensor, data: torch.Tensor, group: Group | None = None) -> None:
        out.copy_(torch.cat(exchanges.gather(*ranks_of(group), data.clone())))

    def broadcast(tensor: torch.Tensor, src: int = 0, group: Group | None = None) -> None:
        kind, ranks = ranks_of(group)
        tensor.copy_(exchanges.gather(kind, ranks, tensor.clone())[list(ranks).index(src)])

    def barrier(group: Group | None = None) -> None:
        exchanges.gather(*ranks_of(group), None)

    def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        handle = exchanges.start(*ranks_of(group), tensor.clone())

        def then(gathered: list[torch.Tensor]) -> None:
            stacked = torch.stack(gathered)
            if op == dist.ReduceOp.MIN:
                tensor.copy_(stacked.amin(0))
            elif op == dist.ReduceOp.MAX:
                tensor.copy_(stacked.amax(0))
            else:
                tensor.copy_(stacked.sum(0))

        work = Work(handle, then)
        return work if async_op else work.wait()

    return [
        (dist, function.__name__, function)
        for function in (
            get_rank, get_world_size, init_process_group, new_group, all_gather_into_tensor, broadcast, barrier,
            all_reduce,
        )
    ]  # fmt: skip
