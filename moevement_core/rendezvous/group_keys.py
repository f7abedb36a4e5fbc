"""Deletion of the keys that torch's process groups leave in the job's store.

Each generation makes its groups anew, under its own prefix. A group over N ranks leaves N values of O(N) bytes, and
torch never deletes them. A rank reads a group's keys only while it makes the group, so nobody needs the keys of a
generation once the next generation trains. Values of the coordinator and of members stay: a process that was stopped
for a long time may still ask if its old generation was interrupted.
"""

from __future__ import annotations

import re

from moevement_core.rendezvous.roster import GROUPS
from moevement_core.rendezvous.signed_store import SignedStore

MOST_DELETED = 100
"""Largest number of keys that one call of :meth:`GroupKeys.delete_some` deletes, so that the call takes little time."""
_GENERATION = re.compile(GROUPS.format(r"(\d{1,18})") + "/")


class GroupKeys:
    """Keys of process groups in the job's store, as the coordinator knows them.

    Args:
        store: store of the job.
    """

    def __init__(self, store: SignedStore) -> None:
        self._store = store.of_groups
        self._old: list[str] = []
        """Keys of old generations that :meth:`delete_some` still has to delete."""

    def trains(self, generation: int) -> None:
        """Find the keys of old generations to delete, because ``generation`` begins to train.

        The keys of the generation right before ``generation`` stay: a process that leaves it late may still be making
        its groups. The call lists all keys of the store once, which takes 5 us a key.
        """
        keys = ((key, _GENERATION.match(key)) for key in self._store.list_keys())
        self._old = [key for key, match in keys if match and int(match[1]) < generation - 1]

    def delete_some(self) -> None:
        """Delete a bounded number of the keys that :meth:`trains` has found."""
        for key in self._old[:MOST_DELETED]:
            self._store.delete_key(key)
        del self._old[:MOST_DELETED]
