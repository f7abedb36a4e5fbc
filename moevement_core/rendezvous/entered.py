"""Account of which ranks of a generation have left it or finished, from the reports of its ranks."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from moevement_core.rendezvous.roster import FINISHED, LEAVING, LEFT
from moevement_core.rendezvous.values import Values


class Entered:
    """Account of the newest generation that has entered training: its members, and which of them have left or finished.

    The coordinator keeps the account. A member *leaves* when a failure interrupts the generation. It *finishes* when it
    has reached the end of the job.

    Args:
        values: values of the job.
    """

    def __init__(self, values: Values) -> None:
        self.generation = -1
        """Newest generation whose ranks have entered training; -1 before the first."""
        self.members: Collection[int] = ()
        """Members that have a rank in the newest generation that has entered training."""
        self.left: dict[int, Mapping[str, Any]] = {}
        """Reports that survivors wrote when they left the generation, by member (:meth:`Member.leave`)."""
        self._finished: set[int] = set()
        """Members that have reached the end of the job."""
        self._phases: dict[int, str] = {}
        """Last phase of leaving (:class:`LeavingPhase`) that a slow member has reported, by member."""
        self._interrupted_at = 0.0
        self._leave_by: dict[int, float] = {}
        """Value of the clock in seconds by which each member must have left the interrupted generation."""
        self._values = values

    def begin(self, generation: int, members: Collection[int]) -> None:
        """Note that ``members`` have entered training in ``generation``, and forget the previous generation."""
        self.generation, self.members = generation, members
        self.left, self._finished, self._phases = {}, set(), {}

    def leaving(self) -> list[Mapping[str, Any]]:
        """Return the reports of the members that have left the generation since the last call."""
        newly = []
        for member, text in self._values.new_reports(LEFT.format(self.generation)).items():
            if member in self.members and member not in self.left:
                self.left[member] = json.loads(text)
                newly.append(self.left[member])
        return newly

    def interrupted(self, now: float) -> None:
        """Note that the generation is interrupted; ``now`` is the value of a monotonic clock in seconds."""
        self._interrupted_at = now
        self._leave_by.clear()

    def inside(self, survivors: Iterable[int]) -> list[int]:
        """Return those of the survivors that have entered training, and have not left the generation."""
        return [member for member in survivors if member in self.members and member not in self.left]

    def late(self, inside: Iterable[int], now: float, leave_s: float) -> list[int]:
        """Return the members that have not left after ``leave_s`` seconds; ``now`` is the value of the clock.

        Leaving has phases, such as the abort of communicators. A member that takes long reports each phase that it
        reaches, and its timeout then begins anew.
        """
        late = []
        for member in inside:
            if now <= self._leave_by.setdefault(member, self._interrupted_at + leave_s):
                continue
            if self._has_new_phase(member):
                self._leave_by[member] = now + leave_s
            else:
                late.append(member)
        return late

    def _has_new_phase(self, member: int) -> bool:
        phase = self._values.reports(LEAVING.format(self.generation)).get(member)
        if phase is None or phase == self._phases.get(member):
            return False
        self._phases[member] = phase
        return True

    def all_finished(self) -> bool:
        """Return True if every member has reached the end of the job."""
        self._finished |= self._values.new_reports(FINISHED.format(self.generation)).keys() & set(self.members)
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
