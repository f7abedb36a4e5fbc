"""Simulated store of the job and its clients. Each request takes a round trip; only single requests are atomic."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from tests.simulation.modules import Waiting, world
from tests.simulation.network import COORDINATOR, Network
from tests.simulation.world import Process


class Store:
    """Store of the job, as the process that holds it uses it, without delays."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.changed = Waiting()

    def set(self, key: str, value: str | bytes) -> None:
        self.values[key] = value.encode() if isinstance(value, str) else value
        self.changed.wake_all()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.values[key] for key in keys]

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self.values for key in keys)

    def compare_set(self, key: str, expected: str | bytes, desired: str) -> bytes:
        """Set a key if it has the expected value; return its value.

        As in torch, an absent key is set if ``expected`` is empty; otherwise the answer is ``expected``.
        """
        now, wanted = self.values.get(key), expected.encode() if isinstance(expected, str) else expected
        if now is None and wanted:
            return wanted
        if now in (None, wanted):
            self.set(key, desired)
            return desired.encode()
        assert now is not None
        return now

    def list_keys(self) -> list[str]:
        return list(self.values)

    def delete_key(self, key: str) -> bool:
        return self.values.pop(key, None) is not None


class Prefixed:
    """Store with a prefix before every key, as torch's ``PrefixStore``.

    Args:
        prefix: prefix of all keys.
        base: the store, or a client of it.
    """

    def __init__(self, prefix: str, base: Store | StoreClient) -> None:
        self._prefix, self._base = f"{prefix}/", base

    def set(self, key: str, value: str | bytes) -> None:
        self._base.set(self._prefix + key, value)

    def compare_set(self, key: str, expected: str | bytes, desired: str) -> bytes:
        return self._base.compare_set(self._prefix + key, expected, desired)

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        assert isinstance(self._base, StoreClient), "who holds the store waits for nothing in it"
        self._base.wait([self._prefix + key for key in keys], timeout)

    timeout = timedelta(seconds=600)

    def set_timeout(self, timeout: timedelta) -> None:
        pass

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._base.multi_get([self._prefix + key for key in keys])

    def list_keys(self) -> list[str]:
        return [key.removeprefix(self._prefix) for key in self._base.list_keys() if key.startswith(self._prefix)]

    def delete_key(self, key: str) -> bool:
        return self._base.delete_key(self._prefix + key)


class StoreClient:
    """Client of the store, through which a process reaches it over the network.

    Args:
        store: store of the job.
        network: network between the process and the store.
        process: process that uses the client.
        slow_s: longest time that the store takes for a request, in seconds, beside the network.
    """

    def __init__(self, store: Store, network: Network, process: Process, slow_s: float) -> None:
        self._store, self._network, self._process, self._slow_s = store, network, process, slow_s

    def _ask(self) -> Store:
        self._network.round_trip(self._process, COORDINATOR)
        if self._slow_s:
            world().sleep(world().rng.uniform(0.0, self._slow_s))
        return self._store

    def set(self, key: str, value: str | bytes) -> None:
        self._ask().set(key, value)

    def get(self, key: str) -> bytes:
        store = self._ask()
        store.changed.until(lambda: key in store.values)
        return store.get(key)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._ask().multi_get(keys)

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask().check(keys)

    def compare_set(self, key: str, expected: str | bytes, desired: str) -> bytes:
        return self._ask().compare_set(key, expected, desired)

    def list_keys(self) -> list[str]:
        return self._ask().list_keys()

    def delete_key(self, key: str) -> bool:
        return self._ask().delete_key(key)

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        store = self._ask()
        if not store.changed.until(lambda: store.check(keys), timeout.total_seconds()):
            raise dist.DistStoreError("wait timeout")
        if not self._network.reaches(self._process.node, COORDINATOR):
            self._network.healed.until(lambda: self._network.reaches(self._process.node, COORDINATOR))
