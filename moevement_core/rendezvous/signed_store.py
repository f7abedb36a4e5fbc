"""The job's store, to which any stranger who reaches its port can write: only what is signed counts.

Keys stand under a prefix that follows from the job's token. A value has a MAC over itself and its key; one without, or
of another key, is as if it were not there. A stranger who lists keys can still delete and overwrite them, so whoever
wrote a value that is needed writes it again (:meth:`SignedStore.keep_written`). Nothing is counted with the store's own
``add``: it breaks the connection of whoever calls it where the value is no number.
"""

from __future__ import annotations

import hmac
import random
import secrets
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from moevement_core import log
from moevement_core.rendezvous.token import Token

_ABSENT = "-"
"""Value that the store gives for an absent key; shorter than anything signed."""
_MAC_CHARACTERS = 64
_ANNOUNCED = "moevement/token"
"""Outside of the prefix, so that a process with another token finds it."""
CLAIMED = "claimed"
"""Rings when a process has claimed something, which whoever holds the store is to keep."""
KEEP_S = 0.25
"""Seconds between two checks that written values are still there."""
MOST_ADOPTED = 100
"""Keys that are looked at, at a time."""
_LOOK_S = 0.05
POLL = timedelta(seconds=1)


class SignedStore:
    """Signed view of the job's store. For one thread.

    Args:
        base: any ``torch.distributed.Store``.
        token: the job's.
        timeout_s: how long :meth:`get` waits.
    """

    def __init__(self, base: Any, token: Token, timeout_s: float = 600.0) -> None:
        self.base, self._token, self._timeout_s = base, token, timeout_s
        self._store = dist.PrefixStore(prefix_of(token), base)
        self._written: dict[str, str] = {}
        self._bells: dict[str, bytes] = {}
        self._refused: dict[str, bytes] = {}
        self._kept_at = -float("inf")
        self._holds_store = False
        self.rejected = 0
        """Values that were found and did not count."""
        self.restored = 0
        """Values of this process that were written again."""

    def set(self, key: str, value: str | bytes) -> None:
        """Write; it is written again when somebody has taken it away."""
        signed = self._sign(key, value)
        self._written[key] = signed
        self._store.set(key, signed)

    def read(self, key: str) -> bytes | None:
        """The value; None where there is none that counts. Never waits."""
        return self._verified(key, self._raw(key))

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have a valid value."""
        return all(self.read(key) is not None for key in keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Block until all of them have a value that counts.

        Raises:
            dist.DistStoreError: not in time.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        for key in keys:
            while True:
                left_s = deadline - time.monotonic()
                self._store.wait([key], timedelta(seconds=max(left_s, 0.001)))
                if self.read(key) is not None:
                    break
                if left_s <= 0:
                    raise dist.DistStoreError(f"{key}: nothing that this job has written")
                time.sleep(min(_LOOK_S, left_s))

    def get(self, key: str) -> bytes:
        """The value; waits for one that counts.

        Raises:
            dist.DistStoreError: not in time.
        """
        deadline = time.monotonic() + self._timeout_s
        while (value := self.read(key)) is None:
            self.keep_written()
            try:
                self.wait([key], POLL)
            except dist.DistStoreError:
                if time.monotonic() > deadline:
                    raise
        return value

    def claim(self, key: str, value: str) -> str:
        """Write, unless somebody of this job has before; returns what is there then."""
        signed = self._sign(key, value)
        expected: Any = ""
        while True:
            raw = self._store.compare_set(key, expected, signed)
            if (found := self._verified(key, raw)) is not None:
                if raw == signed.encode():
                    self._written[key] = signed
                    self.ring(CLAIMED)
                elif self._holds_store:  # who wrote it may not come to writing it again
                    self._written[key] = raw.decode()
                return found.decode()
            expected = raw

    def ring(self, bell: str) -> None:
        """Have whoever listens look at once; a hint, and nothing depends on it."""
        self._store.set(bell, secrets.token_hex(8))

    def has_rung(self, bell: str) -> bool:
        """Return whether the bell was rung since the last call."""
        raw = self._raw(bell)
        is_new = raw != self._bells.get(bell, _ABSENT.encode())
        self._bells[bell] = raw[:64]
        return is_new

    def tag(self, name: str) -> str:
        """Return the tag that stands beside ``name`` in a key that no other job can make, so that
        no key is read in vain.
        """
        return self._token.mac("tag", name.encode()).hex()[:32]

    def keys(self, prefix: str) -> list[str]:
        """Return the keys with a prefix, whichever process wrote them."""
        return [key for key in self._store.list_keys() if key.startswith(prefix)]

    def keep_written(self) -> None:
        """Write again what this process wrote and somebody else changed; call it often, it looks now and then."""
        if time.monotonic() - self._kept_at < KEEP_S:
            return
        for key, signed in list(self._written.items()):
            if (raw := self._raw(key)) != signed.encode():
                if raw != _ABSENT.encode():
                    self._reject(key, raw)
                self.restored += 1
                self._store.set(key, signed)
        if self._holds_store:
            self._announce()
        self._kept_at = time.monotonic()

    def adopt(self, *prefixes: str) -> None:
        """Keep what others of this job wrote once under keys that begin so, as this process's own."""
        new = [key for key in self.keys("") if key.startswith(prefixes) and key not in self._written]
        for key in random.sample(new, min(len(new), MOST_ADOPTED)):  # a stranger's, maybe, and any number of them
            if (value := self.read(key)) is not None:
                self._written[key] = self._sign(key, value)

    def forget(self, prefix: str) -> None:
        """Forget the keys with a prefix: no process needs them any more."""
        for key in [key for key in self._written if key.startswith(prefix)]:
            del self._written[key]
        for key in [key for key in self._refused if key.startswith(prefix)]:
            del self._refused[key]

    def announce(self) -> None:
        """Let processes find out whether they have the token of this job; by whoever holds the store."""
        self._holds_store = True
        self._announce()

    def is_of_this_job(self, patience_s: float) -> bool:
        """Return whether this process has the token of the job that the store belongs to.

        Args:
            patience_s: how long to wait for the job's word on it.
        """
        deadline = time.monotonic() + patience_s
        while True:
            if _raw_of(self.base, _ANNOUNCED) == self._announcement():
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_S)

    def _announce(self) -> None:
        if _raw_of(self.base, _ANNOUNCED) != self._announcement():
            self.base.set(_ANNOUNCED, self._announcement())

    def _announcement(self) -> bytes:
        return self._token.mac("announcement").hex().encode()

    def _raw(self, key: str) -> bytes:
        return _raw_of(self._store, key)

    def _sign(self, key: str, value: str | bytes) -> str:
        data = value.encode() if isinstance(value, str) else value
        return self._token.mac("value", key.encode(), data).hex() + data.decode()

    def _verified(self, key: str, raw: bytes) -> bytes | None:
        if raw == _ABSENT.encode():
            return None
        mac, value = raw[:_MAC_CHARACTERS], raw[_MAC_CHARACTERS:]
        if hmac.compare_digest(mac, self._token.mac("value", key.encode(), value).hex().encode()):
            return value
        self._reject(key, raw)
        return None

    def _reject(self, key: str, raw: bytes) -> None:
        if self._refused.get(key) == raw[:256]:
            return  # the same, seen again
        self._refused[key] = raw[:256]
        self.rejected += 1
        global _is_reported
        if not _is_reported:
            _is_reported = True
            log.warning(f"a value in the job's store ({key}) is of none of its processes, and does not count")


_is_reported = False
"""True if this process has reported that there are invalid values."""


def prefix_of(token: Token) -> str:
    """Return the prefix of all keys of the job."""
    return f"moevement/{token.mac('prefix').hex()[:32]}"


def _raw_of(store: Any, key: str) -> bytes:
    # Not get, which would wait where the key was deleted just now.
    return bytes(store.compare_set(key, _ABSENT, _ABSENT))
