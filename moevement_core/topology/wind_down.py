"""A job that is asked to end, before its machines are taken away, does so at one boundary on all ranks.

Whoever is asked (SIGTERM to a launcher, Slurm's signal before the time limit) sets a flag in the page that a
supervisor shares with its processes. Ranks agree on it in the reduction that they make each iteration anyway, and then
tell the trainer (``Binding.plan_exit``).
"""

from __future__ import annotations

from moevement_core.rendezvous.status_page import own_page


def is_asked_for() -> bool:
    """Returns whether this process was asked to end its job."""
    page = own_page()
    return page is not None and page.is_winding_down
