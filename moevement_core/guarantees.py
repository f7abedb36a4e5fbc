"""Guarantees of a job after a failure: equal bits, or values that are equal up to the order of sums.

Two questions have two answers. *Is the restored state the one that was lost?* And: *do later iterations have the bits
of a job to which nothing happened?* The table in ``docs/guarantees.md`` is :func:`table`, a test compares, and a job on
GPUs logs its own row when it starts (:func:`of_job`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class Promise(StrEnum):
    """Degrees of equality of two states or two runs."""

    EQUAL = "equal bits"
    UP_TO_ORDER = "up to the order of sums"


class Place(StrEnum):
    """Places of a replacement, seen from the rank that it replaces."""

    SAME_DEVICE = "same device"
    SAME_NODE = "same node"
    OTHER_NODE = "another node"


class Restored(StrEnum):
    """Ways in which the state of a failed rank is restored."""

    REDO = "redo"
    REPLAY = "replay"


SAFE_SUM = 2
"""Ranks whose sum has one value in any order: that of two numbers does not depend on which comes first."""

MOST_GATHERED_BYTES = 64 << 20
"""Bytes that a rank receives at most for a sum in rank order; larger sums are left to the library."""


@dataclass(frozen=True)
class Arithmetic:
    """Arithmetic that the bits of a job depend on."""

    uses_gpus: bool
    """True if ranks compute on GPUs and sum by NCCL; otherwise on CPUs, where gloo sums by rank."""
    is_deterministic: bool = True
    """True if kernels add in a fixed order (``--deterministic-mode``); on CPUs they always do."""
    widest_sum: int = SAFE_SUM
    """Ranks in the largest group whose sums NCCL makes in an order of its own."""

    def follows(self, place: Place) -> bool:
        """Return whether sums have other last bits when a rank is in ``place``: rings follow nodes and devices."""
        return self.uses_gpus and self.widest_sum > SAFE_SUM and place is not Place.SAME_DEVICE

    def restored(self, restored: Restored, place: Place) -> Promise:
        """Return how equal the restored state is to the one that was lost.

        Redo is exact everywhere: its updates are elementwise, and the norm is recorded. A replay sums anew.
        """
        if restored is Restored.REDO or (self.is_deterministic and not self.follows(place)):
            return Promise.EQUAL
        return Promise.UP_TO_ORDER

    def later(self, restored: Restored, place: Place) -> Promise:
        """Return how equal later iterations are to those of a job to which nothing happened.

        Without deterministic kernels not even two undisturbed jobs have equal bits.
        """
        if self.is_deterministic and not self.follows(place):
            return self.restored(restored, place)
        return Promise.UP_TO_ORDER


def of_job(arithmetic: Arithmetic, restored: Restored) -> list[str]:
    """Return sentences for the log of a job: what is equal after a failure, by where the replacement runs."""
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
    """Return the lines of the table in Markdown: a row for each arithmetic and way to restore."""
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
