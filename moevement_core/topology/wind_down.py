"""Planned end of a job, after the same iteration on all ranks, before the job loses its machines.

SIGTERM to a launcher, or Slurm's signal before the time limit, sets a flag in a page of memory that a supervisor shares
with its processes. In each iteration, a reduction tells all ranks if the flag is set on any node, and they pass the
result to ``Binding.plan_exit``.
"""

from __future__ import annotations

from moevement_core.rendezvous.status_page import own_page


def is_asked_for() -> bool:
    """Return True if the supervisor has asked the job to end."""
    page = own_page()
    return page is not None and page.is_winding_down
