"""Collectives of ranks: all of them have to come, each learns of it at its own time, and a death may be between."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tests.simulation.modules import Waiting, world
from tests.simulation.world import Process, World

LATE, LATE_S = 0.03, 0.6
"""How often a rank learns of it later than the others, and by how much at most."""


class Exchange:
    """One of them."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self.given: dict[int, Any] = {}
        self.processes: dict[int, Process] = {}
        self.waiting: dict[int, Waiting] = {rank: Waiting() for rank in ranks}
        self.learned: set[int] = set()
        self.failed: set[int] = set()


class Handle:
    """Of a rank's part in one."""

    def __init__(self, exchange: Exchange, rank: int) -> None:
        self._exchange, self._rank = exchange, rank

    def wait(self) -> list[Any]:
        """What all gave, by their order.

        Raises:
            RuntimeError: somebody is gone.
        """
        its, rank = self._exchange, self._rank
        its.waiting[rank].until(lambda: rank in its.learned or rank in its.failed)
        if rank not in its.learned:
            raise RuntimeError("Connection closed by peer")
        return [its.given[one] for one in its.ranks]


class Exchanges:
    """All of one simulation."""

    def __init__(self, its: World) -> None:
        self.world = its
        self._open: dict[Any, Exchange] = {}
        self._gone: dict[int, set[int]] = {}

    def start(self, kind: Any, ranks: Sequence[int], value: Any) -> Handle:
        """Take part; called by every one of ``ranks``."""
        process = self.world.current().process
        assert process.generation is not None
        generation, rank = process.generation.roster.generation, process.rank
        key = (generation, kind, tuple(ranks))
        count = process.exchanged.get(key, 0)
        process.exchanged[key] = count + 1
        exchange = self._open.get((key, count))
        if exchange is None:
            exchange = self._open[key, count] = Exchange(ranks)
        exchange.given[rank], exchange.processes[rank] = value, process
        if self._is_broken(exchange, generation):
            self._fail_soon(exchange)
        elif len(exchange.given) == len(exchange.ranks):
            del self._open[key, count]
            for one in exchange.ranks:
                self._finish_soon(exchange, one, generation)
        return Handle(exchange, rank)

    def gather(self, kind: Any, ranks: Sequence[int], value: Any) -> list[Any]:
        """The same, and wait."""
        return self.start(kind, ranks, value).wait()

    def leave(self, generation: int, rank: int) -> None:
        """The connections of a rank are broken, and those who wait for it will see it."""
        self._gone.setdefault(generation, set()).add(rank)
        for (key, _), exchange in list(self._open.items()):
            if key[0] == generation and rank in exchange.ranks:
                self._fail_soon(exchange)

    def _is_broken(self, exchange: Exchange, generation: int) -> bool:
        return bool(self._gone.get(generation, set()) & set(exchange.ranks))

    def _fail_soon(self, exchange: Exchange) -> None:
        for rank in exchange.given:
            self.world.after(self.world.rng.uniform(0.0, 0.1), partial(self._fail, exchange, rank))

    def _fail(self, exchange: Exchange, rank: int) -> None:
        if rank not in exchange.learned:
            exchange.failed.add(rank)
            exchange.waiting[rank].wake_all()

    def _finish_soon(self, exchange: Exchange, rank: int, generation: int) -> None:
        network = self.world.network
        node = exchange.processes[rank].node
        slowest = max((network.delay_s(one.node, node) for one in exchange.processes.values()), default=0.0)
        if self.world.rng.random() < LATE:
            slowest += self.world.rng.uniform(0.0, LATE_S)
        self.world.after(slowest, partial(self._finish, exchange, rank, generation))

    def _finish(self, exchange: Exchange, rank: int, generation: int) -> None:
        network = self.world.network
        node = exchange.processes[rank].node
        lost = [one for one in exchange.processes.values() if not one.is_alive]
        if (lost or self._is_broken(exchange, generation)) and self.world.rng.random() < 0.5:
            if self._is_broken(exchange, generation):
                self._fail(exchange, rank)
            return
        if not all(network.reaches(one.node, node) for one in exchange.processes.values()):
            self.world.after(0.3, partial(self._finish, exchange, rank, generation))  # sent again and again
            return
        exchange.learned.add(rank)
        exchange.waiting[rank].wake_all()


class Work:
    def __init__(self, handle: Handle, then: Callable[[list[Any]], None]) -> None:
        self._handle, self._then = handle, then

    def wait(self) -> None:
        self._then(self._handle.wait())


class Group:
    """Some ranks."""

    def __init__(self, number: int, ranks: Sequence[int]) -> None:
        self.number, self.ranks = number, tuple(ranks)


def distributed(exchanges: Exchanges) -> list[tuple[Any, str, Any]]:
    """What takes the place of functions of ``torch.distributed``."""

    def me() -> Any:
        return world().current().process

    def everyone() -> range:
        return range(me().world_size)

    def get_rank(group: Any = None) -> int:
        return int(me().rank)

    def get_world_size(group: Any = None) -> int:
        return int(me().world_size)

    def init_process_group(*_: Any, **__: Any) -> None:
        me().groups_made = 0
        exchanges.gather("init", everyone(), None)

    def new_group(ranks: Sequence[int] | None = None, **_: Any) -> Group:
        me().groups_made += 1
        return Group(me().groups_made, everyone() if ranks is None else ranks)

    def ranks_of(group: Group | None) -> tuple[Any, Sequence[int]]:
        return ("group", group.number if group else 0), group.ranks if group else everyone()

    def all_gather_object(out: list[Any], mine: Any, group: Group | None = None) -> None:
        gathered = exchanges.gather(*ranks_of(group), _dumps(mine))
        out[:] = [_loads(one) for one in gathered]

    def broadcast_object_list(objects: list[Any], src: int = 0, group: Group | None = None) -> None:
        kind, ranks = ranks_of(group)
        gathered = exchanges.gather(kind, ranks, _dumps(objects))
        objects[:] = _loads(gathered[list(ranks).index(src)])

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
        (dist, one.__name__, one)
        for one in (
            get_rank, get_world_size, init_process_group, new_group, all_gather_object, broadcast_object_list, barrier,
            all_reduce,
        )
    ]  # fmt: skip


class _Addresses(pickle.Pickler):
    def __init__(self, file: Any, kept: list[Any]) -> None:
        super().__init__(file)
        self._kept = kept

    def persistent_id(self, one: Any) -> int | None:
        from tests.simulation.network import Connections

        if isinstance(one, Connections):
            self._kept.append(one)
            return len(self._kept) - 1
        return None


class _Resolved(pickle.Unpickler):
    def __init__(self, file: Any, kept: list[Any]) -> None:
        super().__init__(file)
        self._kept = kept

    def persistent_load(self, number: int) -> Any:
        return self._kept[number]


def _dumps(value: Any) -> tuple[bytes, list[Any]]:
    import io

    kept: list[Any] = []
    file = io.BytesIO()
    _Addresses(file, kept).dump(value)
    return file.getvalue(), kept


def _loads(dumped: tuple[bytes, list[Any]]) -> Any:
    import io

    return _Resolved(io.BytesIO(dumped[0]), dumped[1]).load()
