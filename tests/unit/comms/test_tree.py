"""Collectives over a tree of ranks: values, equal bits, different calls, lost ranks, and the work of one rank."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moevement_core.comms.connections import Connections
from moevement_core.comms.exchange import all_gather_objects, broadcast_object
from moevement_core.comms.job_group import forget_job_group, job_group
from moevement_core.comms.transport import lock
from moevement_core.comms.tree import FAN_OUT, Reduction, TreeGroup, neighbours
from moevement_core.errors import ExchangeError
from tests.harness import run_ranks

SIZES = (1, 2, FAN_OUT + 1, FAN_OUT + 2, 23)


@contextmanager
def connected(size: int) -> Iterator[list[tuple[TreeGroup, Connections]]]:
    """Yield a group for each rank. Its ranks are the even numbers, so that places and ranks differ."""
    ranks = range(0, 2 * size, 2)
    connections = {rank: Connections("127.0.0.1") for rank in ranks}
    for rank in ranks:
        connections[rank].open(rank, {other: connections[other].address for other in ranks})
    yield [(TreeGroup(ranks, rank, connections[rank].channel("t")), connections[rank]) for rank in ranks]
    for of_rank in connections.values():
        of_rank.close()


def on_all(groups: list[tuple[TreeGroup, Connections]], call: Callable[[TreeGroup], Any]) -> list[Any]:
    """Call a function on a thread for each rank; return the results, or errors, by place."""
    results: list[Any] = [None] * len(groups)

    def run(place: int) -> None:
        try:
            results[place] = call(groups[place][0])
        except Exception as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


@pytest.mark.parametrize("size", [*SIZES, 1000])
def test_every_place_but_the_root_is_below_one_other_and_few_are_below_each(size: int) -> None:
    above = Counter[int]()
    for place in range(size):
        parent, children = neighbours(place, size)
        assert len(children) <= FAN_OUT
        assert (parent is None) == (place == 0)
        above.update(children)
        assert all(neighbours(child, size)[0] == place for child in children)
    assert above == Counter(range(1, size))


@pytest.mark.parametrize("size", SIZES)
def test_collectives_give_every_rank_the_values_of_all_or_of_one(size: int) -> None:
    contributions = [random.Random(place).randbytes(place * 7 % 5 * 100) for place in range(size)]
    with connected(size) as groups:
        assert on_all(groups, lambda group: group.gather(contributions[group.place])) == [contributions] * size
        for source in range(size):

            def broadcast(group: TreeGroup, source: int = source) -> bytes:
                return group.broadcast(contributions[group.place], source)

            assert on_all(groups, broadcast) == [contributions[source]] * size
        assert on_all(groups, lambda group: group.barrier()) == [None] * size


@pytest.mark.parametrize("size", SIZES)
def test_a_question_is_asked_once_after_all_ranks_have_come(size: int) -> None:
    arrived, asked = list[int](), list[int]()

    def ask(group: TreeGroup, *, answer: bool) -> bool:
        time.sleep(0.05 if group.place == size - 1 else 0.0)
        arrived.append(group.place)

        def question() -> bool:
            asked.append(len(arrived))
            return answer

        return group.ask_once(question)

    with connected(size) as groups:
        for answer in (True, False):
            arrived.clear()
            assert on_all(groups, partial(ask, answer=answer)) == [answer] * size
    assert asked == [size, size]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("is_later", [False, True])
def test_reductions_give_the_same_bits_to_every_rank(size: int, *, is_later: bool) -> None:
    values = torch.randn(size, 3, 5, dtype=torch.float64)
    counts = torch.randint(0, 1 << 40, (size, 4))

    def reduce(group: TreeGroup) -> tuple[torch.Tensor, ...]:
        sums, least, most = values[group.place].clone(), counts[group.place].clone(), counts[group.place].clone()
        asked = [(sums, Reduction.SUM), (least, Reduction.MIN), (most, Reduction.MAX)]
        for wait in [group.reduce_later(*arguments) for arguments in asked] if is_later else []:
            wait()
        for tensor, reduction in [] if is_later else asked:
            group.reduce(tensor, reduction)
        group.close()
        return sums, least, most

    with connected(size) as groups:
        results = on_all(groups, reduce)
    for sums, least, most in results:
        assert torch.equal(sums, results[0][0])
        assert torch.equal(least, counts.amin(0))
        assert torch.equal(most, counts.amax(0))
    torch.testing.assert_close(results[0][0], values.sum(0))


def test_ranks_that_call_different_collectives_get_an_error() -> None:
    with connected(2) as groups:
        calls = {0: lambda group: group.gather(b""), 1: lambda group: group.barrier()}
        errors = []

        def call(group: TreeGroup) -> None:
            try:
                calls[group.place](group)
            except ExchangeError as error:
                errors.append(str(error))
                groups[1 - group.place][1].close()  # ends the wait of the other rank
                raise

        on_all(groups, call)
    assert len(errors) == 1
    assert {"2", "collective"} <= set(errors[0].split())


def test_tensors_of_different_sizes_are_an_error() -> None:
    with connected(2) as groups:

        def reduce(group: TreeGroup) -> None:
            try:
                group.reduce(torch.zeros(3 + group.place), Reduction.SUM)
            finally:
                groups[1][1].close()  # ends the wait of the other rank

        errors = on_all(groups, reduce)
    assert isinstance(errors[0], ExchangeError)
    assert "16" in str(errors[0]).split()


@pytest.mark.parametrize("is_later", [False, True])
def test_a_lost_rank_ends_the_waits_of_its_neighbours(*, is_later: bool) -> None:
    with connected(3) as groups:
        on_all(groups, lambda group: group.barrier())
        groups[1][1].close()

        def reduce(group: TreeGroup) -> None:
            if group.place == 0:
                values = torch.zeros(3)
                group.reduce_later(values, Reduction.SUM)() if is_later else group.reduce(values, Reduction.SUM)

        assert isinstance(on_all(groups, reduce)[0], RuntimeError)
        groups[0][0].close()


def test_a_failed_reduction_in_the_background_keeps_nothing_of_its_caller_alive() -> None:
    class Model:
        pass

    def wait_for(wait: Callable[[], None]) -> weakref.ref[Model]:
        model = Model()
        with pytest.raises(RuntimeError):
            wait()
        return weakref.ref(model)

    with connected(2) as groups:
        group, connections = groups[0]
        with lock:
            connections.is_refused = True
        wait = group.reduce_later(torch.zeros(1), Reduction.SUM)
        model = wait_for(wait)
        gc.collect()
        assert model() is None
        group.close()


def _twice() -> list[int]:
    """Use the group of all ranks in two generations."""
    rank, world = dist.get_rank(), dist.get_world_size()
    first = job_group()
    assert first is job_group()
    assert all_gather_objects(rank, int) == list(range(world))
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    dist.destroy_process_group()
    forget_job_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=world)
    assert job_group() is not first
    assert broadcast_object(rank, int, source=world - 1) == world - 1
    return all_gather_objects(rank * rank, int)


def test_each_default_group_has_a_group_of_all_ranks() -> None:
    for outcome in run_ranks(_twice, 6):
        assert outcome.result == [0, 1, 4, 9, 16, 25]


@pytest.mark.parametrize("size", SIZES)
def test_one_rank_decides_on_the_values_of_all(size: int) -> None:
    deciding: list[list[bytes]] = []

    def decide(values: list[bytes]) -> bytes:
        deciding.append(values)
        return b"+".join(values)

    with connected(size) as groups:
        results = on_all(groups, lambda group: group.decide(str(group.place).encode(), decide))
    places = [str(place).encode() for place in range(size)]
    assert deciding == [places]
    assert results == [b"+".join(places)] * size
