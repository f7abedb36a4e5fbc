"""Guarantees of a job after a failure: equal bits, or values that are equal up to the order of sums.

Two questions have separate answers. *Is the restored state equal to the lost state?* *Do later iterations have the bits
of a job without a failure?* :func:`table` makes the table in ``docs/guarantees.md``, and a test compares the two. A job
on GPUs logs its own row of the table at its start (:func:`of_job`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class Promise(StrEnum):
    """Degree of equality of two states or of two runs."""

    EQUAL = "equal bits"
    UP_TO_ORDER = "up to the order of sums"


class Place(StrEnum):
    """Place of a replacement, relative to the rank that it replaces."""

    SAME_DEVICE = "same device"
    SAME_NODE = "same node"
    OTHER_NODE = "another node"


class Restored(StrEnum):
    """Way in which the state of a failed rank is restored."""

    REDO = "redo"
    REPLAY = "replay"


SAFE_SUM = 2
"""Most ranks whose sum has the same value in any order: two numbers have the same sum either way round."""

MOST_GATHERED_BYTES = 64 << 20
"""Most bytes that a rank receives for a sum in rank order; the library computes larger sums."""


@dataclass(frozen=True)
class Arithmetic:
    """Arithmetic of a job, as far as the bits of its results depend on it."""

    uses_gpus: bool
    """True if ranks compute on GPUs and sum with NCCL; False on CPUs, where gloo sums in rank order."""
    is_deterministic: bool = True
    """True if kernels add in a fixed order (``--deterministic-mode``), as they always do on CPUs."""
    widest_sum: int = SAFE_SUM
    """Number of ranks in the largest group whose sums NCCL computes in its own order."""

    def follows(self, place: Place) -> bool:
        """Return True if sums have other last bits for a rank in ``place``, because rings follow nodes and devices."""
        return self.uses_gpus and self.widest_sum > SAFE_SUM and place is not Place.SAME_DEVICE

    def restored(self, restored: Restored, place: Place) -> Promise:
        """Return the degree to which the restored state equals the lost state.

        Redo is exact in every case, because its updates are elementwise and the norm is recorded. A replay computes
        sums again.
        """
        if restored is Restored.REDO or (self.is_deterministic and not self.follows(place)):
            return Promise.EQUAL
        return Promise.UP_TO_ORDER

    def later(self, restored: Restored, place: Place) -> Promise:
        """Return the degree to which later iterations equal those of a job without a failure.

        Without deterministic kernels, even two jobs without failures have different bits.
        """
        if self.is_deterministic and not self.follows(place):
            return self.restored(restored, place)
        return Promise.UP_TO_ORDER


def of_job(arithmetic: Arithmetic, restored: Restored) -> list[str]:
    """Return sentences for the log of a job: the equality after a failure, for each place of the replacement."""
    if all(arithmetic.later(restored, place) is Promise.EQUAL for place in Place):
        return ["after a failure the job goes on with equal bits, wherever replacements run"]
    return [
        f"a replacement on {_ARTICLES[place]}: restored state {arithmetic.restored(restored, place)}, later iterations "
        f"{arithmetic.later(restored, place)}"
        for place in Place
    ] + ["docs/guarantees.md says why"]


_ARTICLES = {Place.SAME_DEVICE: "the same device", Place.SAME_NODE: "the same node", Place.OTHER_NODE: "another node"}

_CASES = (
    ("CPU, gloo", Arithmetic(uses_gpus=False)),
    ("GPU, `--deterministic-mode`, sums of at most two ranks or in rank order", Arithmetic(uses_gpus=True)),
    ("GPU, `--deterministic-mode`, wider sums", Arithmetic(uses_gpus=True, widest_sum=3)),
    ("GPU without `--deterministic-mode`", Arithmetic(uses_gpus=True, is_deterministic=False, widest_sum=3)),
)


def table() -> list[str]:
    """Return the lines of the table in Markdown, with a row for each arithmetic and way to restore."""
    return [
        f"| | state restored by | {' | '.join(f'replacement on {_ARTICLES[place]}' for place in Place)} |",
        "|---|---|---|---|---|",
        *_rows(),
    ]


def _rows() -> Iterator[str]:
    for name, arithmetic in _CASES:
        for restored in Restored:
            cells = []
            for place in Place:
                state, later = arithmetic.restored(restored, place), arithmetic.later(restored, place)
                cells.append(str(state) if state is later else f"state {state}, later iterations {later}")
            yield f"| {name} | {restored} | {' | '.join(cells)} |"
