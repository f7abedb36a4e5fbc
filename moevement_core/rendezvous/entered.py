"""Account of which ranks of a generation have left it or finished, read from values that ranks write to the store."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from moevement_core.rendezvous.backoff import Backoff
from moevement_core.rendezvous.roster import FINISHED, LEAVING, LEFT
from moevement_core.rendezvous.signed_store import SignedStore

FEW = 64
"""Number of members up to which the coordinator asks the store for the value of each. For more, it lists the keys."""


class Entered:
    """Account of the newest generation that has entered training: its members, and which of them have left or finished.

    The coordinator keeps the account. A member *leaves* when a failure interrupts the generation. It *finishes* when it
    has reached the end of the job.

    Args:
        store: store of the job.
        clock: returns monotonic seconds.
    """

    def __init__(self, store: SignedStore, clock: Callable[[], float] = time.monotonic) -> None:
        self.generation = -1
        """Newest generation whose ranks have entered training; -1 before the first."""
        self.members: Collection[int] = ()
        """Members that have a rank in the newest generation that has entered training."""
        self.left: dict[int, Mapping[str, Any]] = {}
        """Reports that survivors wrote when they left the generation, by member (:meth:`Member.leave`)."""
        self._finished: set[int] = set()
        """Members that have reached the end of the job."""
        self._phases: dict[int, bytes] = {}
        """Last phase of leaving (:class:`LeavingPhase`) that a slow member has reported, by member."""
        self._values: dict[str, dict[int, bytes]] = {}
        """Values that members wrote to the store and the coordinator has read, by key and member."""
        self._looks: dict[str, Backoff] = {}
        """Pauses between reads, by key. Without them, each step of the coordinator would read a value for each rank."""
        self._store, self._clock = store, clock

    def begin(self, generation: int, members: Collection[int]) -> None:
        """Note that ``members`` have entered training in ``generation``, and forget the previous generation."""
        self.generation, self.members = generation, members
        self.left, self._finished, self._phases = {}, set(), {}
        self._looks.clear()
        self._values.clear()

    def written_by(self, key: str, generation: int, members: Collection[int]) -> dict[int, bytes] | None:
        """Return the values that members have written under a key of the store.

        Args:
            key: key with ``{}`` in place of the generation, such as :data:`LEFT`. Each member writes its value under
                this key with ``/MEMBER`` appended. Then it changes the key itself, to signal the new value.
            generation: the generation.
            members: members that may have written.

        Returns:
            Values of all ``members`` that have written so far, by member. None if no further member has written since
            the last read, or if it is too early to read again.
        """
        name = key.format(generation)
        look = self._looks.setdefault(name, Backoff(self._clock))
        if not look.is_due(rung=self._store.has_rung(name)):
            return None
        # Each value is read once. Reads of all values whenever a member writes one would be N^2 reads, and an
        # unauthenticated process may overwrite a value after the first read.
        known = self._values.setdefault(name, {})
        keys = {f"{name}/{member}": member for member in members if member not in known}
        with look:
            if len(keys) > FEW:  # Single reads would take a request to the store for each.
                written = [key for key in self._store.keys(f"{name}/") if key in keys]
                values = self._store.read_many(written)
            else:
                values = {key: value for key in keys if (value := self._store.read(key)) is not None}
        new = {keys[key]: value for key, value in values.items()}
        known |= new
        return {member: known[member] for member in members if member in known} if new else None

    def leaving(self) -> list[Mapping[str, Any]]:
        """Return the reports of the members that have left the generation since the last call."""
        newly = []
        for member, text in (self.written_by(LEFT, self.generation, self.members) or {}).items():
            if member not in self.left:
                self.left[member] = json.loads(text)
                newly.append(self.left[member])
        return newly

    def has_new_phase(self, member: int) -> bool:
        """Return True if a member that takes long to leave has reported a further phase since the last call."""
        phase = self._store.read(f"{LEAVING.format(self.generation)}/{member}")
        if phase is None or phase == self._phases.get(member):
            return False
        self._phases[member] = phase
        return True

    def all_finished(self) -> bool:
        """Return True if every member has reached the end of the job."""
        self._finished |= (self.written_by(FINISHED, self.generation, self.members) or {}).keys()
        # A member that died after it had finished still counts, because the job needs nothing more from it.
        return bool(self._finished) and set(self.members) <= self._finished

    @property
    def suspects(self) -> set[int]:
        """Ranks whose processes computed NaN or infinity, as members reported when they left the generation."""
        return {rank for left in self.left.values() for rank in left.get("suspects", ())}

    @property
    def reasons(self) -> list[str]:
        """Errors of the members that left because of an error in their own process, sorted and without duplicates."""
        return sorted({left["reason"] for left in self.left.values() if left["reason"]})
