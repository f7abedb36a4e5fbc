"""Observer of each iteration, for benchmarks alone.

There is one in a process, set before training begins, because the script that is measured is run as it is.
"""

from __future__ import annotations

from typing import Any


class Observer:
    """Observer that does nothing."""

    is_capturing = True
    """True if snapshots are captured; only a benchmark turns them off."""

    def before_iteration(self, session: Any, committed: int) -> None:
        """``state@committed`` is live and nothing of the next iteration has happened.

        Args:
            session: this rank's :class:`~moevement_core.session.session.Session`.
            committed: the last iteration.
        """


observer = Observer()
"""The one of this process."""


def observe(by: Observer) -> None:
    """Let ``by`` look from now on."""
    global observer
    observer = by
