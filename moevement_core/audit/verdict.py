"""Verdict on an audit: the ranks whose results were wrong, decided by one rank from the findings of all ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from moevement_core.audit.evidence import Computed, Difference
from moevement_core.audit.replicas import ReplicaDigest


@dataclass(frozen=True)
class Finding:
    """Finding of one rank in an audit."""

    stage: int
    """Pipeline stage of the rank."""
    clean_at: int | None
    """Newest iteration that this rank knows its stage to have computed right; None for none."""
    difference: Difference | None = None
    """First difference between two executions of the iteration; None without one."""
    replicas: tuple[ReplicaDigest, ...] = ()
    """Digests of weights that other ranks hold as well; empty in an audit of a stage."""


@dataclass(frozen=True)
class Suspect:
    """Rank whose results were wrong."""

    rank: int
    operators: tuple[str, ...]
    """Operators with wrong results; empty if they are not known."""
    text: str
    """Description of the wrong result."""


@dataclass(frozen=True)
class AuditVerdict:
    """Result of an audit, which one rank decides and all ranks get."""

    suspects: tuple[Suspect, ...] = ()
    clean_at: int | None = None
    """Newest iteration that the stages of all suspects are known to have computed right; None for none."""


def judge(findings: Sequence[Finding]) -> AuditVerdict:
    """Return the ranks whose results were wrong in an audit of a stage.

    They are the ranks with the difference nearest to its cause (:mod:`moevement_core.audit.evidence`). If several ranks
    compute the same result together, such as tensor-parallel ranks, all of them are suspects.

    Args:
        findings: finding of every rank, in order of ranks.
    """
    differing = {rank: finding.difference for rank, finding in enumerate(findings) if finding.difference is not None}
    if not differing:
        return AuditVerdict()
    first = min((each.computed, each.place) for each in differing.values())
    suspects = tuple(
        Suspect(rank, each.operators, Computed(each.computed).text)
        for rank, each in sorted(differing.items()) if (each.computed, each.place) == first
    )  # fmt: skip
    return AuditVerdict(suspects, _clean_at(findings, suspects))


def judge_replicas(findings: Sequence[Finding]) -> AuditVerdict:
    """Return the ranks whose compute weights differ from those of most of their data-parallel replicas.

    Two replicas alone cannot tell which of them is wrong, so both are suspects.

    Args:
        findings: finding of every rank, in order of ranks.
    """
    groups: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    for rank, finding in enumerate(findings):
        for replica in finding.replicas:
            groups[replica.operator, replica.ranks][rank] = replica.digest
    wrong: dict[int, list[str]] = {}
    for (operator, _), digests in groups.items():
        (most, count), *others = Counter(digests.values()).most_common()
        if not others:
            continue
        is_majority = count * 2 > len(digests)
        for rank in (rank for rank, digest in digests.items() if not is_majority or digest != most):
            wrong.setdefault(rank, []).extend([operator] if operator else [])
    suspects = tuple(
        Suspect(rank, tuple(operators), "compute weights, compared with its data-parallel replicas")
        for rank, operators in sorted(wrong.items())
    )
    return AuditVerdict(suspects, _clean_at(findings, suspects) if suspects else None)


def _clean_at(findings: Sequence[Finding], suspects: Sequence[Suspect]) -> int | None:
    """Return the oldest of the newest clean iterations of the suspects' stages; None if a stage has none."""
    newest = []
    for stage in {findings[suspect.rank].stage for suspect in suspects}:
        known = [each.clean_at for each in findings if each.stage == stage and each.clean_at is not None]
        if not known:
            return None
        newest.append(max(known))
    return min(newest)
