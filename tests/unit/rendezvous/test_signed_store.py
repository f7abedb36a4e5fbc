"""Signed values in a real store that an unauthenticated peer changes. Members read only the job's own values."""

from __future__ import annotations

import random
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from moevement_core.comms.token import Token
from moevement_core.rendezvous import signed_store
from moevement_core.rendezvous.signed_store import MOST_ADOPTED, MOST_KEPT, SignedStore, prefix_of

TOKEN = Token.new()
KEY = f"{prefix_of(TOKEN)}/key"


class Stranger:
    """Unauthenticated peer at the same store; unlike ``TCPStore.set``, its methods return once a write is done."""

    def __init__(self) -> None:
        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20)
        )
        self.port = self._store.port

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)
        self._store.check([key])

    def get(self, key: str) -> bytes:
        return bytes(self._store.get(key))

    def delete_key(self, key: str) -> None:
        self._store.delete_key(key)


class Settled(SignedStore):
    """Signed store whose writes are done when its methods return."""

    def set(self, key: str, value: str | bytes) -> None:
        super().set(key, value)
        self.read(key)

    def keep_written(self) -> None:
        super().keep_written()
        self.read("key")


@pytest.fixture
def stranger() -> Stranger:
    return Stranger()


@pytest.fixture
def store(stranger: Stranger, monkeypatch: pytest.MonkeyPatch) -> SignedStore:
    monkeypatch.setattr(signed_store, "KEEP_S", 0.0)
    return client(stranger)


def client(stranger: Stranger, token: Token = TOKEN, timeout_s: float = 5.0) -> SignedStore:
    return Settled(dist.TCPStore("127.0.0.1", stranger.port, is_master=False), token, timeout_s)


def test_what_is_written_is_read_by_others_of_the_job_alone(stranger: Stranger, store: SignedStore) -> None:
    store.set("key", "valué")
    assert client(stranger).read("key") == "valué".encode()
    assert client(stranger, Token.new()).read("key") is None
    assert store.read("nothing") is None
    store.set("empty", "")
    assert client(stranger).read("empty") == b""


def test_values_of_strangers_are_not_there(stranger: Stranger, store: SignedStore) -> None:
    store.set("key", "value")
    whole, seeded = stranger.get(KEY), random.Random(3)
    reader = client(stranger)
    store.set("other", "value")
    edited = [
        b"", b"x", b"-", whole[:-1], whole[:64], whole + b"!", whole[64:], whole.upper(), b"\xff" * 80,
        b"0" * (1 << 20),
        stranger.get(f"{prefix_of(TOKEN)}/other"), *(seeded.randbytes(seeded.randrange(200)) for _ in range(200)),
    ]  # fmt: skip
    for _ in range(200):
        damaged = bytearray(whole)
        damaged[seeded.randrange(len(damaged))] ^= 1 << seeded.randrange(8)
        edited.append(bytes(damaged))
    for value in edited:
        stranger.set(KEY, value)
        assert reader.read("key") is None, value[:100]
        assert not reader.check(["key"])
    assert reader.rejected > 300
    stranger.set(KEY, whole)
    assert reader.read("key") == b"value"


def test_one_bad_value_counts_once_however_often_it_is_seen(stranger: Stranger, store: SignedStore) -> None:
    stranger.set(KEY, "x")
    for _ in range(5):
        assert store.read("key") is None
    assert store.rejected == 1


def test_what_was_taken_away_is_written_again(stranger: Stranger, store: SignedStore) -> None:
    store.set("key", "value")
    stranger.set(KEY, "x")
    store.keep_written()
    assert client(stranger).read("key") == b"value"
    stranger.delete_key(KEY)
    store.keep_written()
    assert client(stranger).read("key") == b"value"
    assert store.restored == 2
    store.forget("k")
    stranger.delete_key(KEY)
    store.keep_written()
    assert client(stranger).read("key") is None


def test_what_others_wrote_once_is_kept_by_who_has_adopted_it(stranger: Stranger, store: SignedStore) -> None:
    client(stranger).set("job/name", "n")
    stranger.set(f"{prefix_of(TOKEN)}/job/x", "none of ours")
    store.adopt("job/")
    stranger.delete_key(f"{prefix_of(TOKEN)}/job/name")
    store.keep_written()
    assert client(stranger).read("job/name") == b"n"
    assert client(stranger).read("job/x") is None


def test_many_values_of_others_are_checked_in_turn(stranger: Stranger, store: SignedStore) -> None:
    keys = [f"tasks/{number}" for number in range(2 * MOST_KEPT + 50)]
    writer = client(stranger)
    for key in keys:
        writer.set(key, "host")
    for _ in range(len(keys) // MOST_ADOPTED + 1):
        store.adopt("tasks/")
    for key in keys:
        stranger.delete_key(f"{prefix_of(TOKEN)}/{key}")
    restored = list[int]()
    for _ in range(3):
        store.keep_written()
        restored.append(store.restored)
    assert restored == [MOST_KEPT, 2 * MOST_KEPT, len(keys)]
    assert client(stranger).check(keys)


def test_waiting_goes_on_over_values_that_do_not_count(stranger: Stranger, store: SignedStore) -> None:
    stranger.set(KEY, "x")
    began = time.monotonic()
    with pytest.raises(dist.DistStoreError):
        store.wait(["key"], timedelta(seconds=0.3))
    assert time.monotonic() - began < 3
    threading.Timer(0.3, lambda: client(stranger).set("key", "late")).start()
    assert store.get("key") == b"late"
    with pytest.raises(dist.DistStoreError):
        client(stranger, timeout_s=0.2).get("never")


def test_the_first_to_claim_has_it_whatever_a_stranger_puts_there(stranger: Stranger, store: SignedStore) -> None:
    stranger.set(KEY, b"\xff\x00 none of ours")
    assert store.claim("key", "mine") == "mine"
    assert client(stranger).claim("key", "theirs") == "mine"


def test_who_holds_the_store_keeps_what_another_one_has_claimed(stranger: Stranger, store: SignedStore) -> None:
    store.announce()
    assert client(stranger).claim("key", "theirs") == "theirs"
    assert store.claim("key", "mine") == "theirs"
    stranger.delete_key(KEY)
    store.keep_written()
    assert client(stranger).read("key") == b"theirs"


def test_a_bell_is_heard_once(stranger: Stranger, store: SignedStore) -> None:
    listener = client(stranger)
    assert not listener.has_rung("bell")
    store.ring("bell")
    store.read("key")
    assert listener.has_rung("bell")
    assert not listener.has_rung("bell")
    stranger.set(f"{prefix_of(TOKEN)}/bell", b"\xff" * (1 << 20))
    assert listener.has_rung("bell")


def test_a_process_with_another_token_finds_out(stranger: Stranger, store: SignedStore) -> None:
    store.announce()
    assert client(stranger).is_of_this_job(0.0)
    assert not client(stranger, Token.new()).is_of_this_job(0.1)
    stranger.set("moevement/token", "x")
    store.keep_written()
    assert client(stranger).is_of_this_job(0.0)
