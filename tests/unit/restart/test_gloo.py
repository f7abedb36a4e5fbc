"""Groups of gloo are created where an interruption can reach the rank that creates them."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, override

import pytest
import torch
import torch.distributed as dist

from moevement_core.restart.gloo import interruptibly, make_gloo_interruptible

original_group = dist.ProcessGroupGloo


class _Interrupted(Exception):
    pass


class _PeerDies(Exception):
    pass


class _DiesOnceItsAddressIsKnown(dist.Store):
    """Store of a member that publishes its address and dies before a peer connects to it."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store

    @override
    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    @override
    def wait(self, *_: Any) -> None:
        raise _PeerDies


@pytest.fixture(autouse=True)
def _torch_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist.distributed_c10d, "ProcessGroupGloo", dist.ProcessGroupGloo)


class _Rank:
    """Thread that is interrupted like the main thread of a rank."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.raised: BaseException | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.raised = error

    def interrupt(self) -> None:
        assert self._thread.ident is not None
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread.ident), ctypes.py_object(_Interrupted))
        self._thread.join()


def test_a_wait_that_nothing_ends_is_left() -> None:
    waits, never = threading.Event(), threading.Event()
    ended: list[bool] = []

    def make() -> None:
        waits.set()
        never.wait()
        ended.append(True)

    rank = _Rank(lambda: interruptibly(make))
    waits.wait()
    rank.interrupt()
    assert isinstance(rank.raised, _Interrupted)
    assert not ended
    never.set()


def test_what_is_made_and_what_fails_is_handed_on() -> None:
    assert interruptibly(lambda: 7) == 7
    assert interruptibly(lambda: None) is None
    with pytest.raises(ZeroDivisionError):
        interruptibly(lambda: 1 // 0)


def test_a_rank_is_freed_that_waits_for_a_member_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeat until the rank waits for a connection. If it happens to connect itself, it is refused at once."""
    make_gloo_interruptible()
    assert any(_is_left_while_it_waits(monkeypatch) for _ in range(50))


def _is_left_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> bool:
    store = dist.PrefixStore("job", dist.HashStore())
    with pytest.raises((_PeerDies, RuntimeError)):
        original_group(_DiesOnceItsAddressIsKnown(store), 0, 2, timedelta(seconds=60))
    connects, ended = threading.Event(), threading.Event()

    def make(*args: Any, **options: Any) -> Any:
        connects.set()
        try:
            return original_group(*args, **options)
        finally:
            ended.set()

    with monkeypatch.context() as patch:
        patch.setattr(dist, "ProcessGroupGloo", make)
        rank = _Rank(lambda: dist.distributed_c10d.ProcessGroupGloo(store, 1, 2, timeout=timedelta(seconds=60)))
        connects.wait()
        ended.wait(0.5)
        rank.interrupt()
    return isinstance(rank.raised, _Interrupted) and not ended.is_set()


def test_torch_makes_and_uses_groups_as_before() -> None:
    make_gloo_interruptible()
    make_gloo_interruptible()
    stands = dist.distributed_c10d.ProcessGroupGloo
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        values = torch.ones(3)
        dist.all_reduce(values)
        backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
        assert values.tolist() == [1, 1, 1]
        assert isinstance(backend, stands)
        assert type(backend) is dist.ProcessGroupGloo
        assert stands.create_default_device is dist.ProcessGroupGloo.create_default_device
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=5))
    finally:
        dist.destroy_process_group()
