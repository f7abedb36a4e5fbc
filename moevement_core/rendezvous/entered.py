"""The generation whose ranks have entered training, and what they wrote since."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from moevement_core.rendezvous.now_and_then import Now
from moevement_core.rendezvous.roster import FINISHED, LEAVING, LEFT
from moevement_core.rendezvous.signed_store import SignedStore


class Entered:
    """As the coordinator sees it.

    Args:
        store: the job's.
        clock: seconds, monotonic.
    """

    def __init__(self, store: SignedStore, clock: Callable[[], float] = time.monotonic) -> None:
        self.generation = -1
        """The newest whose ranks have entered training."""
        self.members: Collection[int] = ()
        self.left: dict[int, Mapping[str, Any]] = {}
        """What survivors of it wrote when they left it."""
        self._finished: set[int] = set()
        self._phases: dict[int, bytes] = {}
        """The phase of leaving that each member was last known to be in."""
        self._found: dict[str, int] = {}
        self._looks: dict[str, Now] = {}
        """So that a job of a thousand ranks is not asked a thousand questions at every step."""
        self._store, self._clock = store, clock

    def begin(self, generation: int, members: Collection[int]) -> None:
        """These have entered it."""
        self.generation, self.members = generation, members
        self.left, self._finished, self._phases = {}, set(), {}
        self._looks.clear()
        self._found.clear()

    def written_by(self, key: str, generation: int, members: Collection[int]) -> dict[int, bytes] | None:
        """Return what ``members`` have written under ``key``; None if that is nobody new since the last look.

        Each value is read once: a second look at it may find what an unauthenticated peer has made of it meanwhile, and
        a member that counts as seen is not looked at again.
        """
        name = key.format(generation)
        look = self._looks.setdefault(name, Now(self._clock))
        if not look.is_due(rung=self._store.has_rung(name)):
            return None
        with look:
            values = {member: self._store.read(f"{name}/{member}") for member in members}
            found = {member: value for member, value in values.items() if value is not None}
        if len(found) == self._found.get(name, 0):
            return None
        self._found[name] = len(found)
        return found

    def leaving(self) -> list[Mapping[str, Any]]:
        """What members wrote that have left since the last look."""
        newly = []
        for member, text in (self.written_by(LEFT, self.generation, self.members) or {}).items():
            if member not in self.left:
                self.left[member] = json.loads(text)
                newly.append(self.left[member])
        return newly

    def has_come_further(self, member: int) -> bool:
        """Return whether a member has reported another phase of leaving since it was last asked for."""
        phase = self._store.read(f"{LEAVING.format(self.generation)}/{member}")
        if phase is None or phase == self._phases.get(member):
            return False
        self._phases[member] = phase
        return True

    def all_finished(self) -> bool:
        """Whether every member has come to the end of the job."""
        self._finished |= (self.written_by(FINISHED, self.generation, self.members) or {}).keys()
        # What dies on its way out after everyone has come to the end takes nothing of the job with it.
        return bool(self._finished) and set(self.members) <= self._finished

    @property
    def suspects(self) -> set[int]:
        """Ranks whose processes compute results that are not finite, as members reported when they left."""
        return {rank for left in self.left.values() for rank in left.get("suspects", ())}

    @property
    def reasons(self) -> list[str]:
        """Why members left, those that had a reason of their own."""
        return sorted({left["reason"] for left in self.left.values() if left["reason"]})
