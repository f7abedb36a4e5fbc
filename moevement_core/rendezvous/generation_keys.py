"""Deletion of the values of past generations from the job's store, so that the store does not grow with each recovery.

A generation leaves some 5 values of each member, its roster, and the keys of torch's process groups, which torch never
deletes. Nobody needs the values of a generation once the next but one trains: members skip generations that are over.
Only the record that a generation was interrupted stays. A process that was stopped for a long time may still ask for
it, and must then learn that its generation is over.
"""

from __future__ import annotations

import re

from moevement_core.rendezvous.roster import GROUPS, INTERRUPTED
from moevement_core.rendezvous.signed_store import SignedStore

MOST_DELETED = 100
"""Largest number of keys that one call of :meth:`GenerationKeys.delete_some` deletes, so that it takes little time."""
_GROUPS = re.compile(GROUPS.format(r"(\d{1,18})") + "/")
_VALUES = re.compile(r"generation/(\d{1,18})/")


class GenerationKeys:
    """Keys of past generations in the job's store, as the coordinator knows them.

    Args:
        store: store of the job.
    """

    def __init__(self, store: SignedStore) -> None:
        self._store = store
        self._old_groups: list[str] = []
        """Keys of process groups that :meth:`delete_some` still has to delete."""
        self._old_values: list[str] = []
        """Keys of signed values that :meth:`delete_some` still has to delete."""

    def trains(self, generation: int) -> None:
        """Find the keys of old generations to delete, because ``generation`` begins to train.

        The keys of the generation right before ``generation`` stay: a process that leaves it late may still be making
        its groups. The call lists all keys of the store, which takes 5 us a key.
        """
        self._old_groups = [
            key
            for key in self._store.of_groups.list_keys()
            if (match := _GROUPS.match(key)) and int(match[1]) < generation - 1
        ]
        self._old_values = [
            key
            for key in self._store.keys("generation/")
            if (match := _VALUES.match(key))
            and int(match[1]) < generation - 1
            and key != INTERRUPTED.format(int(match[1]))
        ]

    def delete_some(self) -> None:
        """Delete a bounded number of the keys that :meth:`trains` has found."""
        for key in self._old_groups[:MOST_DELETED]:
            self._store.of_groups.delete_key(key)
        for key in self._old_values[:MOST_DELETED]:
            self._store.delete(key)
        del self._old_groups[:MOST_DELETED], self._old_values[:MOST_DELETED]
