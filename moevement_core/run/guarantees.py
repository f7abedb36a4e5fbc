"""Guarantees of a job after a failure: equal bits, or values that are equal up to the order of sums.

Two questions have separate answers. *Is the restored state equal to the lost state?* *Do later iterations have the bits
of a job without a failure?* :func:`table` makes the table in ``docs/guarantees.md``, and a test checks that the page is
up to date. A job on GPUs logs its guarantees when it starts (:func:`of_job`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class Promise(StrEnum):
    """Degree to which two states, or the iterations of two runs, are promised to be equal."""

    EQUAL = "equal bits"
    UP_TO_ORDER = "up to the order of sums"


class ReplacementPlace(StrEnum):
    """Place where a replacement runs, relative to the failed process that it replaces."""

    SAME_DEVICE = "same device"
    SAME_NODE = "same node"
    OTHER_NODE = "another node"


class Restored(StrEnum):
    """Method that restores the state of a failed rank."""

    REDO = "redo"
    REPLAY = "replay"


SAFE_SUM = 2
"""Largest number of ranks whose sum has the same bits in any order of ranks."""

MOST_GATHERED_BYTES = 64 << 20
"""Largest number of bytes that a rank gathers from other ranks to add them in rank order.

If a sum needs more, NCCL computes it, in an order that NCCL chooses.
"""


@dataclass(frozen=True)
class Arithmetic:
    """Properties of a job's arithmetic that determine the bits of results."""

    uses_gpus: bool
    """True if ranks compute on GPUs and sum with NCCL; False on CPUs, where gloo sums in rank order."""
    is_deterministic: bool = True
    """True if kernels add in a fixed order: on GPUs with ``--deterministic-mode``, and always on CPUs."""
    widest_sum: int = SAFE_SUM
    """Number of ranks in the largest group whose sums NCCL computes in an order that NCCL chooses."""

    def follows(self, place: ReplacementPlace) -> bool:
        """Return True if the last bits of sums may change when a replacement runs at ``place``.

        NCCL's rings depend on nodes and devices, and the order of sums depends on the rings.
        """
        return self.uses_gpus and self.widest_sum > SAFE_SUM and place is not ReplacementPlace.SAME_DEVICE

    def restored(self, restored: Restored, place: ReplacementPlace) -> Promise:
        """Return the degree to which the restored state equals the lost state.

        Redo is exact in every case, because its updates are elementwise and the gradient norm is recorded. A replay
        computes sums again.
        """
        if restored is Restored.REDO or (self.is_deterministic and not self.follows(place)):
            return Promise.EQUAL
        return Promise.UP_TO_ORDER

    def later(self, restored: Restored, place: ReplacementPlace) -> Promise:
        """Return the degree to which later iterations equal those of a job without a failure.

        Without deterministic kernels, even two jobs without failures have different bits.
        """
        if self.is_deterministic and not self.follows(place):
            return self.restored(restored, place)
        return Promise.UP_TO_ORDER


def of_job(arithmetic: Arithmetic, restored: Restored) -> list[str]:
    """Return sentences for a job's log, which say what is equal after a failure, for each place of a replacement."""
    if all(arithmetic.later(restored, place) is Promise.EQUAL for place in ReplacementPlace):
        return ["after a failure the job computes the bits of a job without failures, wherever replacements run"]
    return [
        f"after a failure with the replacement on {_ARTICLES[place]}: restored state: "
        f"{arithmetic.restored(restored, place)}; later iterations: {arithmetic.later(restored, place)}"
        for place in ReplacementPlace
    ] + ["docs/guarantees.md has the reasons"]


_ARTICLES = {
    ReplacementPlace.SAME_DEVICE: "the same device",
    ReplacementPlace.SAME_NODE: "the same node",
    ReplacementPlace.OTHER_NODE: "another node",
}

_CASES = (
    ("CPU, gloo", Arithmetic(uses_gpus=False)),
    ("GPU, `--deterministic-mode`, sums of at most two ranks or in rank order", Arithmetic(uses_gpus=True)),
    ("GPU, `--deterministic-mode`, wider sums", Arithmetic(uses_gpus=True, widest_sum=3)),
    ("GPU without `--deterministic-mode`", Arithmetic(uses_gpus=True, is_deterministic=False, widest_sum=3)),
)


def table() -> list[str]:
    """Return the lines of the table for ``docs/guarantees.md``, in Markdown.

    It has a row for each kind of arithmetic with each method that restores state, and a column for each place.
    """
    return [
        f"| | state restored by | {' | '.join(f'replacement on {_ARTICLES[place]}' for place in ReplacementPlace)} |",
        "|---|---|---|---|---|",
        *_rows(),
    ]


def _rows() -> Iterator[str]:
    for name, arithmetic in _CASES:
        for restored in Restored:
            cells = []
            for place in ReplacementPlace:
                state, later = arithmetic.restored(restored, place), arithmetic.later(restored, place)
                cells.append(str(state) if state is later else f"state {state}, later iterations {later}")
            yield f"| {name} | {restored} | {' | '.join(cells)} |"
