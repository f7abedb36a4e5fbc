"""Deletion of what past generations have left behind, so that a job does not grow with each recovery.

A generation leaves some 4 reports of each member, and the keys of torch's process groups, which torch never
deletes. Nobody needs them once the next but one trains: members skip generations that are over.
"""

from __future__ import annotations

import re
from typing import Any

from moevement_core.rendezvous.roster import GENERATION, GROUPS
from moevement_core.rendezvous.values import Values

MOST_DELETED = 100
"""Largest number of keys that one call of :meth:`GenerationKeys.delete_some` deletes, so that it takes little time."""
_GROUPS = re.compile(GROUPS.format(r"(\d{1,18})") + "/")


class GenerationKeys:
    """Keys of past generations, as the coordinator knows them.

    Args:
        values: values of the job.
        groups: store of torch's process groups.
    """

    def __init__(self, values: Values, groups: Any) -> None:
        self._values, self._groups = values, groups
        self._newest = -1
        """Newest generation whose reports are deleted."""
        self._old: list[str] = []
        """Keys of process groups that :meth:`delete_some` still has to delete."""

    def trains(self, generation: int) -> None:
        """Delete the reports on old generations, and find their keys of process groups, as ``generation`` now trains.

        The keys of the generation right before ``generation`` stay: a process that leaves it late may still be making
        its groups. The call lists all keys of the store, which takes 5 us a key.
        """
        for old in range(self._newest + 1, generation - 1):
            self._values.forget_reports(GENERATION.format(old))
            self._newest = old
        self._old = [
            key for key in self._groups.list_keys() if (match := _GROUPS.match(key)) and int(match[1]) < generation - 1
        ]

    def delete_some(self) -> None:
        """Delete a bounded number of the keys that :meth:`trains` has found."""
        for key in self._old[:MOST_DELETED]:
            self._groups.delete_key(key)
        del self._old[:MOST_DELETED]
