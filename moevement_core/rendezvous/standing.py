"""State of a coordinator that is in no other value of the job, as a value for the next coordinator."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from moevement_core.rendezvous.attempts import AttemptCounts
from moevement_core.rendezvous.roster import Death, decoded

STANDING = "coordinator/standing"
"""Key of the newest :class:`Standing`."""


@dataclass(frozen=True)
class Standing:
    """State of a coordinator after one of its steps; see the attributes of :class:`Coordinator` of the same names."""

    dead: tuple[int, ...]
    """Members that have died."""
    given_up: tuple[int, ...]
    new_deaths: tuple[Death, ...]
    unrecovered: tuple[Death, ...]
    uncounted: tuple[int, ...]
    """Ranks that have died, and whose deaths were not counted yet."""
    counts: AttemptCounts
    entered: int
    """Newest generation that has entered training; -1 before the first."""
    entered_members: tuple[int, ...]
    judged: int
    suspect_nodes: tuple[str, ...]
    broken: tuple[str, ...]
    block: int
    split: tuple[int, ...]
    first_committed_at: float | None
    is_winding_down: bool

    def encode(self) -> str:
        """Return this object as text."""
        return msgspec.json.encode(self).decode()

    @staticmethod
    def decode(text: str) -> Standing:
        """Decode a value that :meth:`encode` has returned.

        Raises:
            ExchangeError: the value is not an encoded :class:`Standing`.
        """
        return decoded(text, Standing)
