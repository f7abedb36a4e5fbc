"""Health of nodes as their supervisors report it: nodes that are not healthy, and nodes that the scheduler takes away.

Both are drained. But a scheduler that takes all nodes away, at the end of a job's time, notifies all of them, one after
the other. So the job waits for :data:`NOTICE_S` before it decides whether some nodes leave or the whole job.
"""

from __future__ import annotations

from collections.abc import Mapping

from moevement_core.run.drain_requests import DrainRequest

NOTICE_S = 3.0
"""Seconds after a notice of a scheduler in which further nodes may get theirs."""


class NodeNotices:
    """Reasons for which nodes are to be drained, by the supervisors that have reported them."""

    def __init__(self) -> None:
        self._reasons: dict[str, tuple[str, str]] = {}
        """Node and reason of each supervisor whose node is to be drained."""
        self._leaving_since: dict[str, float] = {}
        """Supervisors whose node the scheduler takes away, each with the time of its first report."""

    def take(self, supervisor: str, node: str | None, reason: str, leaving_at: float | None) -> None:
        """Take in the newest report of a supervisor.

        Args:
            supervisor: name of the supervisor.
            node: its node; None if it has no process at present, which leaves an earlier report as it was.
            reason: reason to drain the node; empty for a healthy node.
            leaving_at: value of a monotonic clock in seconds if the scheduler takes the node away, else None.
        """
        if not reason:
            self._reasons.pop(supervisor, None)
            self._leaving_since.pop(supervisor, None)
        elif node is not None:
            self._reasons[supervisor] = node, reason
            if leaving_at is not None:
                self._leaving_since.setdefault(supervisor, leaving_at)

    @property
    def requests(self) -> dict[str, DrainRequest]:
        """Requests to drain nodes, by node."""
        return {node: DrainRequest(reason) for node, reason in sorted(self._reasons.values(), reverse=True)}

    def ranks_leaving(self, now: float, nodes: Mapping[int, str]) -> int:
        """Return the number of ranks on nodes that the scheduler takes away; 0 while further notices may come.

        Args:
            now: value of the monotonic clock in seconds.
            nodes: node of each rank.
        """
        if not self._leaving_since or now < max(self._leaving_since.values()) + NOTICE_S:
            return 0
        leaving = {self._reasons[supervisor][0] for supervisor in self._leaving_since}
        return sum(node in leaving for node in nodes.values())
