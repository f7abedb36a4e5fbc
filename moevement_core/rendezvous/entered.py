"""The generation whose ranks have entered training, and what they wrote since."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from moevement_core.rendezvous.roster import FINISHED, LEFT


class Entered:
    """As the coordinator sees it.

    Args:
        store: the job's.
    """

    def __init__(self, store: Any) -> None:
        self.generation = -1
        """The newest whose ranks have entered training."""
        self.members: Collection[int] = ()
        self.left: dict[int, Mapping[str, Any]] = {}
        """What survivors of it wrote when they left it."""
        self._finished: set[int] = set()
        self._counts: dict[str, int] = {}
        """Counters in the store, so that a job of a thousand ranks is not asked a thousand questions at every step."""
        self._store = store

    def begin(self, generation: int, members: Collection[int]) -> None:
        """These have entered it."""
        self.generation, self.members = generation, members
        self.left, self._finished = {}, set()

    def written_by(self, key: str, generation: int, members: Collection[int]) -> set[int] | None:
        """Those of ``members`` that have written ``key``; None if that is nobody new since the last look."""
        name = key.format(generation)
        count = int(self._store.add(name, 0))
        if count == self._counts.get(name, 0):
            return None
        self._counts[name] = count
        return {member for member in members if self._store.check([f"{name}/{member}"])}

    def leaving(self) -> list[Mapping[str, Any]]:
        """What members wrote that have left since the last look."""
        newly = []
        for member in self.written_by(LEFT, self.generation, self.members) or ():
            if member not in self.left:
                self.left[member] = json.loads(self._store.get(f"{LEFT.format(self.generation)}/{member}"))
                newly.append(self.left[member])
        return newly

    def all_finished(self) -> bool:
        """Whether every member has come to the end of the job."""
        self._finished |= self.written_by(FINISHED, self.generation, self.members) or set()
        # What dies on its way out after everyone has come to the end takes nothing of the job with it.
        return bool(self._finished) and set(self.members) <= self._finished

    @property
    def reasons(self) -> list[str]:
        """Why members left, those that had a reason of their own."""
        return sorted({left["reason"] for left in self.left.values() if left["reason"]})
