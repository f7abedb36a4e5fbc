"""Seconds until a failure is noticed, and until ranks have process groups again, by the size of the job.

docs/leases.md describes the detectors. :class:`Constants` says which of its numbers are measured, and where.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

FAN_OUT = 4
"""Largest number of ranks below a rank in the tree of exchanges, as in ``moevement_core/comms/tree.py``."""


class Notice(StrEnum):
    """Kind of notice by which the coordinator learns of a failure."""

    SUPERVISOR = "supervisor"
    """Report of the node's supervisor that a process has ended."""
    RESET = "reset"
    """Broken connection to a supervisor whose kernel still answers."""
    LEASE = "lease"
    """Silence of a node, until its lease of ten seconds is over."""


DETECTION_S: Mapping[Notice, float] = {Notice.SUPERVISOR: 0.1, Notice.RESET: 1.0, Notice.LEASE: 10.0}
"""Seconds from a failure to its detection, with the default lease time (docs/leases.md)."""


def detection_s(weights: Mapping[Notice, float]) -> float:
    """Return the mean seconds of detection of failures with different kinds of notice.

    Args:
        weights: number or share of the failures with each kind of notice.
    """
    return sum(DETECTION_S[notice] * weight for notice, weight in weights.items()) / sum(weights.values())


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Constants of :func:`regroup`, for ranks on separate machines with a GPU each.

    Measured by this project, on one host: :attr:`fixed_s`, :attr:`question_s` and :attr:`group_s`. Published by others,
    not measured by this project: :attr:`connect_s`. Assumed: all others.
    """

    fixed_s: float = 0.3
    """Seconds of a recovery that do not depend on the number of ranks: abort, regroup and entering the loop with four
    ranks. Measured (benchmarks/regroup.md, first row)."""
    exchanges: int = 10
    """Number of exchanges of a value of each rank. Assumed."""
    hop_s: float = 1e-4
    """Seconds from a rank to its neighbour in the tree. Assumed; over loopback 25 microseconds are measured."""
    entry_bytes: int = 100
    """Bytes of a rank's value in an exchange. Assumed."""
    link_bytes_per_s: float = 1e9
    """Bytes per second that a rank sends to its neighbours in the tree, all together. Assumed."""
    questions: int = 10
    """Number of requests of each rank to the coordinator and its store. Assumed; five are reads of addresses."""
    question_s: float = 14e-6
    """Seconds of the coordinator for a request. Measured: 4,096 at once take 60 to 80 ms (benchmarks/scale.md)."""
    group_s: float = 2.34 / 16_384
    """Seconds in which every rank calls ``new_group``, for each rank of the job.

    Measured with 16,384 ranks over groups without connections (benchmarks/regroup.md). The model is a time linear in
    the number of ranks, because the number of groups is. Rows with 512 to 4,096 ranks differ by 41% at most.
    """
    connect_s: float = 265 / 96_000
    """Seconds in which the communicators connect, for each rank of the job.

    Published, and not measured here: about 265 s for NCCL with 96,000 GPUs, as a summary of arXiv 2510.20171 reports.
    The model is a time linear in the number of ranks. The paper's growth is more than linear, so the model gives
    too much for fewer ranks.
    """


@dataclass(frozen=True)
class Regrouping:
    """Parts of regrouping, in seconds."""

    fixed_s: float
    exchange_s: float
    """Seconds of all exchanges over the tree."""
    coordinator_s: float
    """Seconds in which the coordinator and its store answer the ranks, one after the other."""
    groups_s: float
    """Seconds in which each rank makes the process groups."""
    connect_s: float
    """Seconds in which the communicators connect."""

    @property
    def total_s(self) -> float:
        """Seconds from the detection of a failure until new process groups are ready."""
        return self.fixed_s + self.exchange_s + self.coordinator_s + self.groups_s + self.connect_s


def depth(ranks: int) -> int:
    """Return the number of steps from the root of the tree to the rank that is farthest from it, O(log N)."""
    steps, place = 0, ranks - 1
    while place > 0:
        place, steps = (place - 1) // FAN_OUT, steps + 1
    return steps


def regroup(ranks: int, constants: Constants | None = None) -> Regrouping:
    """Return the parts of regrouping a job.

    An exchange goes up the tree and down again. On the way down, a rank sends the values of all ranks to each of its
    :data:`FAN_OUT` neighbours below. The work of the coordinator, the groups and the connections are linear in the
    number of ranks.

    Args:
        ranks: number of ranks of the job, N.
        constants: constants of the model; None for the defaults.
    """
    known = constants or Constants()
    steps = depth(ranks)
    values_s = FAN_OUT * ranks * known.entry_bytes / known.link_bytes_per_s
    return Regrouping(
        fixed_s=known.fixed_s,
        exchange_s=known.exchanges * steps * (2 * known.hop_s + values_s),
        coordinator_s=ranks * known.questions * known.question_s,
        groups_s=ranks * known.group_s,
        connect_s=ranks * known.connect_s,
    )
