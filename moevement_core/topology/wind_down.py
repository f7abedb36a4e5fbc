"""Planned end of a job at the same boundary on all ranks, before its machines are taken away.

SIGTERM to a launcher, or Slurm's signal before the time limit, sets a flag in a page of memory that a supervisor shares
with its processes. Ranks agree on the flag by a reduction in each iteration. Once it is set anywhere, all ranks call
``Binding.plan_exit``.
"""

from __future__ import annotations

from moevement_core.rendezvous.status_page import own_page


def is_asked_for() -> bool:
    """Return True if the supervisor has asked the job to end."""
    page = own_page()
    return page is not None and page.is_winding_down
