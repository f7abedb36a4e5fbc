"""A job that is asked to end, before its machines are taken away, does so at one boundary on all ranks.

Whoever is asked (SIGTERM to a launcher, Slurm's signal before the time limit) sets a flag in the page that a
supervisor shares with its processes. Ranks agree on it in the reduction that they make each iteration anyway, and then
let Megatron exit as if ``--exit-interval`` had come: with a save where there is a place for one, and exit code 0.
"""

from __future__ import annotations

from argparse import Namespace

from moevement_core.rendezvous.status_page import own_page


def is_asked_for() -> bool:
    """Whether this process was asked to end its job."""
    page = own_page()
    return page is not None and page.is_winding_down


class PlannedExit:
    """Where Megatron's loop is to exit: after the iteration that all ranks have agreed on, or as the flag says."""

    def __init__(self, args: Namespace) -> None:
        self._args, self._flag = args, args.exit_interval

    def plan(self, committed: int, *, winding_down: bool) -> None:
        """Before each iteration, on every rank alike.

        Args:
            committed: the last iteration.
            winding_down: whether the job is to end after the next one.
        """
        self._args.exit_interval = committed + 1 if winding_down else self._flag

    def forget(self) -> None:
        """A failure came in between: a rank that is new knows nothing of it, and all agree again."""
        self._args.exit_interval = self._flag
