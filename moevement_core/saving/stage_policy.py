"""Decisions of a stage about windows, and the agreement of its ranks on them after a failure.

Ranks decide at the beginning of a window, with collectives. A failure may interrupt some ranks before the last
collective and others after it. A rank therefore reports only decisions that it completed, and all ranks continue with
the newest decisions that any rank reports.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from moevement_core.comms.codec import Plain, decode, encode, pack_schedule, unpack_schedule
from moevement_core.comms.exchange import all_gather_objects, broadcast_object
from moevement_core.engine.lifetime import RunSpan
from moevement_core.policy.schedule import Schedule, is_other_window


@dataclass(frozen=True)
class Policy:
    """Decisions of one stage about its windows and its order of operators."""

    window_start: int
    """First iteration of the newest window that the stage has decided on."""
    schedules: tuple[Schedule, ...]
    learned: Any
    """State that the strategy has learned, such as token counts, as ``Strategy.learned()`` returns it."""
    settled: bool
    """True if W is final, so ranks stop measuring for it."""
    announced: int | None
    """First snapshot of the newest window that the job logged as persisted; None without one."""
    began_at: int
    """Iteration that the job started from."""
    disk_job: str
    """Name of the job's start, which windows on disk carry; empty if the job has not used a folder yet."""
    needed: RunSpan | None
    """Newest recoverable run that is persisted on every rank; None without one."""
    keeps_own_copies: bool
    """True if ranks keep their own snapshots after all peers have copies."""
    failures: int = 0
    """Number of failures from which the job has recovered since :attr:`began_at`."""
    worth: float = 0.0
    """Share of training time that saving should cost because ranks fail; 0.0 if unknown."""

    def with_windows_of(self, other: Policy) -> Policy:
        """Return this policy, extended by the windows that only ``other`` has decided on.

        In these windows, operators keep the order of this policy.

        Args:
            other: policy of another stage, which has decided on later windows than this stage.
        """
        newest, schedules = self.schedules[-1], list(self.schedules)
        for schedule in other.schedules:
            last = schedules[-1]
            if schedule.start >= newest.start and is_other_window(schedule, last):
                schedules.append(schedule.for_operators_of(newest))
        return replace(self, window_start=other.window_start, schedules=tuple(schedules), settled=other.settled)

    def for_stage(self, first: Schedule, learned: Any) -> Policy:
        """Return a policy with this policy's windows, for another stage of which no rank survived.

        The other stage learns its order of operators anew.

        Args:
            first: first schedule of the other stage.
            learned: learned state of the other stage's strategy, which has counted no tokens yet.
        """
        schedules = tuple(old.for_operators_of(first) for old in self.schedules)
        return replace(self, schedules=schedules, learned=learned)


@dataclass(frozen=True)
class SentPolicy:
    """Encoding of a :class:`Policy` for the exchange between ranks."""

    rest: Policy
    """Policy without schedules and learned state."""
    schedules: tuple[tuple[str, bytes], ...]
    learned: Plain

    @staticmethod
    def of(policy: Policy) -> SentPolicy:
        """Return the encoding of ``policy``."""
        rest = replace(policy, schedules=(), learned=None)
        return SentPolicy(rest, tuple(map(pack_schedule, policy.schedules)), Plain(policy.learned))

    def policy(self) -> Policy:
        """Return the policy that this object encodes."""
        return replace(self.rest, schedules=tuple(map(unpack_schedule, self.schedules)), learned=self.learned.value)


@dataclass(frozen=True)
class _Summary:
    """Summary of a rank's policy, which all ranks exchange."""

    stage: int
    window_start: int = 0
    digest: bytes = b""
    """Digest of the encoded policy; empty on a rank that was not in training."""


def share_policy(stage: int, policy: Policy | None) -> tuple[Policy, bool]:
    """Return the policy with which this rank continues after a failure. Collective.

    Ranks exchange digests of their policies. A policy is sent only if a rank lacks it, and then by one rank. Usually
    this is the policy of each stage that has replacements.

    Args:
        stage: pipeline stage of this rank.
        policy: newest decisions that this rank has completed; None on a replacement. One rank at least has a policy.

    Returns:
        The result of :func:`agree`.
    """
    encoded = encode(SentPolicy.of(policy)) if policy is not None else b""
    own = _Summary(stage)
    if policy is not None:
        own = _Summary(stage, policy.window_start, hashlib.sha256(encoded).digest()[:16])
    summaries = all_gather_objects(own, _Summary)
    chosen, senders = chosen_policies(summaries)
    policies = {}
    for sender in senders:
        sent = broadcast_object(SentPolicy.of(policy) if policy is not None else None, SentPolicy, source=sender)
        policies[sender] = sent.policy()
    if (latest := chosen.get(stage)) is not None and latest not in policies:  # this rank has an equal policy
        policies[latest] = decode(encoded, SentPolicy).policy()
    return agree(stage, [(summaries[rank].stage, policies[rank]) for rank in sorted(policies)])


def chosen_policies(summaries: Sequence[_Summary]) -> tuple[dict[int, int], list[int]]:
    """Return the rank whose policy each stage takes, and the ranks that have to send their policies to others.

    Args:
        summaries: summary of every rank's policy.
    """
    chosen: dict[int, int] = {}
    for rank, summary in enumerate(summaries):
        if not summary.digest:
            continue
        if (before := chosen.get(summary.stage)) is None or summaries[before].window_start < summary.window_start:
            chosen[summary.stage] = rank
    newest = max(sorted(chosen.values()), key=lambda rank: summaries[rank].window_start)
    senders = set[int]()
    for summary in summaries:
        latest = chosen.get(summary.stage)
        if latest is not None and summary.digest != summaries[latest].digest:
            senders.add(latest)
        if latest is None or summaries[latest].window_start < summaries[newest].window_start:
            senders.add(newest)
    return chosen, sorted(senders)


def agree(stage: int, reported: Sequence[tuple[int, Policy]]) -> tuple[Policy, bool]:
    """Return the policy with which all ranks of a stage continue; every rank chooses the same.

    Args:
        stage: pipeline stage of this rank.
        reported: stage and policy of ranks that were in training, in the order of ranks.

    Returns:
        The policy, and True if it belongs to this stage. If False, its schedules order the operators of another stage.
    """
    newest = max((policy for _, policy in reported), key=lambda policy: policy.window_start)
    own = [policy for owner, policy in reported if owner == stage]
    if not own:
        return newest, False
    latest = max(own, key=lambda policy: policy.window_start)
    return (latest if latest.window_start == newest.window_start else latest.with_windows_of(newest)), True
