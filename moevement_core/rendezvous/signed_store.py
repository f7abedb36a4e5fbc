"""Client of the job's store that signs values, because any process that reaches the port can write to the store.

All keys have a prefix that is derived from the job's token. Each value has a MAC over the value and its key. A value
without a valid MAC is ignored, as if it did not exist.

A process without the token that lists the keys can still delete and overwrite values. So a value's writer restores it
(:meth:`SignedStore.keep_written`). The store's own ``add`` is not used, because it breaks the caller's connection if
the value is not a number.
"""

from __future__ import annotations

import hmac
import random
import secrets
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from moevement_core import log
from moevement_core.comms.token import Token

_ABSENT = "-"
"""Placeholder that the store returns for an absent key; it is shorter than any signed value."""
_MAC_CHARACTERS = 64
"""Number of hexadecimal digits of a MAC."""
_ANNOUNCED = "moevement/token"
"""Key of the announcement of the job's token; it has no prefix, so that a process with another token finds it."""
CLAIMED = "claimed"
"""Key that a process changes to signal that it has claimed another key.

The process that holds the store then reads the claimed value, and restores it if another process deletes it.
"""
KEEP_S = 0.25
"""Seconds between two checks that the values of this process are still in the store."""
MOST_KEPT = 200
"""Largest number of values that one call of :meth:`SignedStore.keep_written` checks. With more values, several calls
check them in turn."""
MOST_AT_ONCE = 500
"""Largest number of keys that one request of :meth:`SignedStore.read_many` asks for."""
MOST_ADOPTED = 100
"""Largest number of keys that one call of :meth:`SignedStore.adopt` reads, so that the call takes little time."""
_LOOK_S = 0.05
"""Seconds between two reads of a key whose value has no valid MAC."""
POLL = timedelta(seconds=1)
"""Longest single wait in :meth:`SignedStore.get`. After each wait, this process restores values that it has written."""


class SignedStore:
    """Signed client of the job's store. One thread calls all methods.

    Args:
        base: any ``torch.distributed.Store``.
        token: token of the job.
        timeout_s: seconds that :meth:`get` waits for a value.
    """

    def __init__(self, base: Any, token: Token, timeout_s: float = 600.0) -> None:
        self.base, self._token, self._timeout_s = base, token, timeout_s
        self._store = dist.PrefixStore(prefix_of(token), base)
        self._written: dict[str, str] = {}
        """Signed values of this process, by key. If another process changes or deletes one, the writer restores it."""
        self._adopted: dict[str, str] = {}
        """Signed values that other processes wrote, and that this process restores, too, by key."""
        self._to_check: list[str] = []
        """Keys that the next calls of :meth:`keep_written` check."""
        self._bells: dict[str, bytes] = {}
        """Value of each signal key (*bell*) at the last call of :meth:`has_rung`, by key."""
        self._refused: dict[str, bytes] = {}
        """Beginning of the last ignored value of each key, so that a second read does not count the value again."""
        self._kept_at = -float("inf")
        self._holds_store = False
        """True if this process holds the store, and so also restores values that other processes have claimed."""
        self.rejected = 0
        """Number of values that were ignored because they had no valid MAC."""
        self.restored = 0
        """Number of times that this process has restored a value which another process had changed or deleted."""

    @property
    def of_groups(self) -> Any:
        """Store for torch's process groups, which cannot sign values: the same store, with its own prefix of keys."""
        return dist.PrefixStore(f"{prefix_of(self._token)}/groups", self.base)

    def set(self, key: str, value: str | bytes) -> None:
        """Write a signed value. If another process changes or deletes it, :meth:`keep_written` restores it."""
        signed = self._sign(key, value)
        self._written[key] = signed
        self._store.set(key, signed)

    def read(self, key: str) -> bytes | None:
        """Return the value of a key; None if there is no value with a valid MAC. The method never waits."""
        return self._verified(key, self._raw(key))

    def read_many(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Return the values of keys that have one with a valid MAC, by key.

        The method takes one request to the store for :data:`MOST_AT_ONCE` keys. It is for keys that exist: if another
        process has just deleted one, the method waits for a second, and then reads each key by itself.
        """
        values: dict[str, bytes] = {}
        for first in range(0, len(keys), MOST_AT_ONCE):
            some = list(keys[first : first + MOST_AT_ONCE])
            for key, raw in zip(some, self._raw_of_many(some), strict=True):
                if (value := self._verified(key, raw)) is not None:
                    values[key] = value
        return values

    def _raw_of_many(self, keys: list[str]) -> list[bytes]:
        usual = self._store.timeout  # type: ignore[attr-defined]
        self._store.set_timeout(POLL)
        try:
            return [bytes(raw) for raw in self._store.multi_get(keys)]
        except dist.DistStoreError:
            return [self._raw(key) for key in keys]
        finally:
            self._store.set_timeout(usual)

    def check(self, keys: list[str]) -> bool:
        """Return True if all keys have a value with a valid MAC."""
        return all(self.read(key) is not None for key in keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Block until all keys have a value with a valid MAC.

        Raises:
            dist.DistStoreError: a key has no such value within ``timeout``.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        for key in keys:
            while True:
                left_s = deadline - time.monotonic()
                self._store.wait([key], timedelta(seconds=max(left_s, 0.001)))
                if self.read(key) is not None:
                    break
                if left_s <= 0:
                    raise dist.DistStoreError(f"{key} in the job's store has no value with a valid signature")
                time.sleep(min(_LOOK_S, left_s))

    def get(self, key: str) -> bytes:
        """Wait for a value with a valid MAC, and return it.

        Raises:
            dist.DistStoreError: the key has no such value within the timeout of this client.
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
        """Return the value of a key; first write ``value`` if no process of this job has written the key before."""
        signed = self._sign(key, value)
        expected: Any = ""
        while True:
            raw = self._store.compare_set(key, expected, signed)
            if (winner := self._verified(key, raw)) is not None:
                if raw == signed.encode():
                    self._written[key] = signed
                    self.ring(CLAIMED)
                elif self._holds_store:  # The writer may end before it can restore the value.
                    self._adopted[key] = raw.decode()
                return winner.decode()
            expected = raw

    def ring(self, bell: str) -> None:
        """Signal a new value: change the key ``bell``, so that processes that watch it read the new value at once.

        A changed bell is only a hint: processes without the job's token can change a bell, too, or undo a change.
        """
        self._store.set(bell, secrets.token_hex(8))

    def has_rung(self, bell: str) -> bool:
        """Return True if the key ``bell`` has changed since the last call: then a process has signalled a new value."""
        raw = self._raw(bell)
        is_new = raw != self._bells.get(bell, _ABSENT.encode())
        self._bells[bell] = raw[:64]
        return is_new

    def tag(self, name: str) -> str:
        """Return a MAC of ``name`` to be used as a part of a key. Without the job's token, nobody can compute the MAC.

        So if a key contains a name with its tag, a process of the job has made the key. Readers ignore other keys.
        """
        return self._token.mac("tag", name.encode()).hex()[:32]

    def keys(self, prefix: str) -> list[str]:
        """Return the keys that begin with ``prefix``, including those that processes without the token wrote."""
        return [key for key in self._store.list_keys() if key.startswith(prefix)]

    def keep_written(self) -> None:
        """Restore the values of this process that a process without the job's token has changed or deleted.

        Processes call this often; the method checks values once in :data:`KEEP_S` seconds, and at most
        :data:`MOST_KEPT` at a time: each check is a request to the store, and the coordinator takes over a value of
        every task.
        """
        if time.monotonic() - self._kept_at < KEEP_S:
            return
        self._to_check = self._to_check or [*self._written, *self._adopted]
        keys, self._to_check = self._to_check[:MOST_KEPT], self._to_check[MOST_KEPT:]
        for key in keys:
            if (signed := self._written.get(key) or self._adopted.get(key)) is None:
                continue  # forgotten meanwhile
            if (raw := self._raw(key)) != signed.encode():
                if raw != _ABSENT.encode():
                    self._reject(key, raw)
                self.restored += 1
                self._store.set(key, signed)
        if self._holds_store:
            self._announce()
        self._kept_at = time.monotonic()

    def adopt(self, *prefixes: str) -> None:
        """Take over values that others wrote under ``prefixes``, so that :meth:`keep_written` restores them too.

        The process that holds the store calls this, because a writer may end before it can restore its value.
        """
        known = self._written.keys() | self._adopted.keys()
        new = [key for key in self.keys("") if key.startswith(prefixes) and key not in known]
        # Unauthenticated processes may have written many such keys. A random sample bounds the time of a call.
        for key in random.sample(new, min(len(new), MOST_ADOPTED)):
            if (value := self.read(key)) is not None:
                self._adopted[key] = self._sign(key, value)

    def delete(self, key: str) -> None:
        """Delete a value that no process needs any more."""
        for values in (self._written, self._adopted, self._refused, self._bells):
            values.pop(key, None)
        self._store.delete_key(key)

    def forget(self, prefix: str) -> None:
        """Stop restoring values whose keys begin with ``prefix``, because no process needs these values any more."""
        values: dict[str, Any]
        for values in (self._written, self._adopted, self._refused, self._bells):
            for key in [key for key in values if key.startswith(prefix)]:
                del values[key]

    def announce(self) -> None:
        """Publish a proof of the job's token, so that other processes can compare their tokens with it.

        The process that holds the store calls this once.
        """
        self._holds_store = True
        self._announce()

    def is_of_this_job(self, patience_s: float) -> bool:
        """Return True if this process has the token of the job that the store belongs to.

        Args:
            patience_s: seconds to wait for the proof that :meth:`announce` publishes.
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
            return  # This value was counted before.
        self._refused[key] = raw[:256]
        self.rejected += 1
        global _is_reported
        if not _is_reported:
            _is_reported = True
            log.warning(f"the value of {key} in the job's store has no valid signature; this process ignores it")


_is_reported = False
"""True if this process has warned about an ignored value; it warns only once."""


def prefix_of(token: Token) -> str:
    """Return the prefix of all keys of the job."""
    return f"moevement/{token.mac('prefix').hex()[:32]}"


def _raw_of(store: Any, key: str) -> bytes:
    # The store's ``get`` would wait if another process had just deleted the key.
    return bytes(store.compare_set(key, _ABSENT, _ABSENT))
