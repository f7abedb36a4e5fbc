"""Observer that the session calls in each iteration; only benchmarks use it.

A benchmark sets the observer of its process before training begins, and runs the script that it measures unchanged.
"""

from __future__ import annotations

from typing import Any


class Observer:
    """Base class of observers; its method does nothing."""

    is_capturing = True
    """True if snapshots are captured; only a benchmark turns them off."""

    def before_iteration(self, session: Any, committed: int) -> None:
        """Observe the beginning of an iteration, while ``state@committed`` is live. The session calls it.

        Args:
            session: :class:`~moevement_core.session.session.Session` of this rank.
            committed: last committed iteration.
        """


observer = Observer()
"""Observer of this process."""


def observe(by: Observer) -> None:
    """Make ``by`` the observer of this process."""
    global observer
    observer = by
