"""Decisions of a stage about windows, and how its ranks agree on them again after a failure.

Decisions are made at the beginning of a window, with collectives. A failure may interrupt some ranks before the last of
them and some after it. So a rank says only what it had come to the end of, and all go on by the newest that any has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from moevement_core.comms.codec import Plain, pack_schedule, unpack_schedule
from moevement_core.policy.schedule import Schedule, is_other_window


@dataclass(frozen=True)
class Policy:
    """Decisions of one stage."""

    window_start: int
    """The first iteration of the newest window that was decided about."""
    schedules: tuple[Schedule, ...]
    learned: Any
    """State that the strategy has learned, as it exports and imports it."""
    settled: bool
    """True if W is not to be measured any more."""
    announced: int
    began_at: int
    disk_job: str
    needed: tuple[int, int]
    keeps_own: bool
    """True if ranks keep their own snapshots when all peers have them."""

    def with_windows_of(self, other: Policy) -> Policy:
        """Windows begin and end where those of ``other`` do, which has decided more; orders stay what they are."""
        newest, schedules = self.schedules[-1], list(self.schedules)
        for schedule in other.schedules:
            last = schedules[-1]
            if schedule.start >= newest.start and is_other_window(schedule, last):
                schedules.append(newest.with_windows_of(schedule))
        return replace(self, window_start=other.window_start, schedules=tuple(schedules), settled=other.settled)

    def for_stage(self, first: Schedule, learned: Any) -> Policy:
        """The same windows, for a stage of which nobody is left who knew its order; a new one comes by and by.

        Args:
            first: a schedule of that stage, of any windows.
            learned: by its strategy, which has counted nothing yet.
        """
        schedules = tuple(first.with_windows_of(old) for old in self.schedules)
        return replace(self, schedules=schedules, learned=learned)


@dataclass(frozen=True)
class SentPolicy:
    """A :class:`Policy` on its way to other ranks."""

    rest: Policy
    """Policy without schedules and learned state."""
    schedules: tuple[tuple[str, bytes], ...]
    learned: Plain

    @staticmethod
    def of(policy: Policy) -> SentPolicy:
        """Return the policy in the form that is sent."""
        rest = replace(policy, schedules=(), learned=None)
        return SentPolicy(rest, tuple(map(pack_schedule, policy.schedules)), Plain(policy.learned))

    def policy(self) -> Policy:
        """The inverse of :meth:`of`."""
        return replace(self.rest, schedules=tuple(map(unpack_schedule, self.schedules)), learned=self.learned.value)


def agree(stage: int, told: Sequence[tuple[int, Policy]]) -> tuple[Policy, bool]:
    """Return the policy with which all ranks of a stage continue; every rank chooses the same.

    Args:
        stage: pipeline stage of this rank.
        told: stage and policy of every rank that was in training.

    Returns:
        The policy, and True if it belongs to this stage; otherwise its orders are of another table.
    """
    newest = max((policy for _, policy in told), key=lambda policy: policy.window_start)
    own = [policy for owner, policy in told if owner == stage]
    if not own:
        return newest, False
    latest = max(own, key=lambda policy: policy.window_start)
    return (latest if latest.window_start == newest.window_start else latest.with_windows_of(newest)), True
