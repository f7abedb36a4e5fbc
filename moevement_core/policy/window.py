"""Size W of a window: the number of iterations in which every operator is saved once (section 3.5, Algorithm 1).

Two functions find the size:

- :func:`find_window_size` is the paper's algorithm. It assumes operators of equal size and a single bandwidth.
- :func:`choose_window` is for live runs. It takes the bytes of each operator on each rank of a stage. It also takes
  two limits for an iteration: the bytes that a rank can copy from the device, and those that the network carries to the
  rank's peers (as in section 4.2 of MoEtion).

The paper leaves these cases open. This file decides them as follows:

* An operator that exceeds the budget by itself gets a slot of its own. That slot is reported as over budget, because
  training will stall there. The other slots stay within the budget, so only this slot stalls.
* If the compute weights of frozen operators alone exceed the budget, each slot holds one operator until the weights
  fit. Each of these slots is reported.
* A window has at most as many slots as there are operators. Only :func:`impose_window` may make a longer one, and then
  its last slots are empty. Its caller gives the size: the maximum over the ranks of the job, or the value of a flag.
* Zero bandwidth, a zero iteration time and a table without operators are errors. A single operator has a window of one
  iteration.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from moevement_core.errors import WindowError
from moevement_core.operators import OperatorTable
from moevement_core.policy.popularity import Order

ROUNDING = 1e-6
"""Fraction of an iteration that is ignored when a number of iterations is rounded up."""
_BALANCE_STEPS = 10  # the peak is balanced to within 1/1024 of the budget


class WindowKind(StrEnum):
    """Kind of a window. It determines the operators whose compute weights a slot saves."""

    ALIGNED = "aligned"
    """A slot saves the compute weights of operators in later slots, as in the paper. A recovery needs a whole window
    and rolls back W to 2W iterations."""
    ROLLING = "rolling"
    """A snapshot also saves the compute weights of all operators outside its slot. A recovery can use any W consecutive
    snapshots and rolls back W iterations. Snapshots have more bytes than with ``ALIGNED``."""


@dataclass(frozen=True, slots=True)
class PaperWindow:
    """Result of the paper's ``FindWindowSize()``."""

    window: int
    """W_sparse, iterations."""
    active: int
    """O_Active, number of operators whose full state a slot saves."""
    fits: bool
    """True if the copy of the first snapshot takes no longer than an iteration. The copy may take longer, because the
    algorithm never goes below two active operators."""


def find_window_size(
    operators: int,
    iteration_s: float,
    compute_bytes: float,
    master_bytes: float,
    optimizer_bytes: float,
    bytes_per_s: float,
) -> PaperWindow:
    """Return the window of ``FindWindowSize()`` in the paper's Algorithm 1, which assumes operators of equal size.

    The code follows the algorithm line by line.

    Args:
        operators: number of operators.
        iteration_s: T_Iter, seconds.
        compute_bytes: S_Compute, bytes of one operator's compute weights.
        master_bytes: S_Master, bytes of one operator's master weights.
        optimizer_bytes: S_Optim, bytes of one operator's optimizer state.
        bytes_per_s: B_PCIe, effective bandwidth from device to host.

    Raises:
        WindowError: there are no operators, a size is negative, or bandwidth or time is not positive.
    """
    if operators < 1:
        raise WindowError(f"{operators} operators are too few; a window needs at least one")
    _positive("iteration time", iteration_s, "s", "measure it, or give --iteration-time")
    _positive("bandwidth from device to host", bytes_per_s, "bytes/s", "measure it, or give --d2h-bandwidth")
    for name, size in (("compute", compute_bytes), ("master", master_bytes), ("optimizer", optimizer_bytes)):
        if not (math.isfinite(size) and size >= 0):
            raise WindowError(f"{name} state of an operator has {size} bytes; needs a finite size that is not negative")

    def snapshot_s(active: int) -> float:
        frozen = operators - active
        return ((master_bytes + optimizer_bytes) * active + compute_bytes * frozen) / bytes_per_s

    active = operators
    while active > 2:
        if snapshot_s(active) <= iteration_s:
            break
        active -= 1
    return PaperWindow(math.ceil(operators / active), active, snapshot_s(active) <= iteration_s)


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits on the bytes that one rank can save in an iteration without a stall."""

    iteration_s: float
    """Seconds of an iteration."""
    d2h_bytes_per_s: float
    """Bandwidth of copies from device to host, in bytes per second."""
    replication_bytes_per_s: float = math.inf
    """Network bandwidth for sending this rank's snapshots during training, in bytes per second; infinite if the rank
    sends none."""
    replicas: int = 2
    """r, number of peers that receive every snapshot (MoEvement section 3.2)."""
    reserved_d2h_bytes: float = 0.0
    """Bytes per iteration that the boundary log copies to the host."""

    def __post_init__(self) -> None:
        _positive("iteration time", self.iteration_s, "s", "measure it, or give --iteration-time")
        _positive("bandwidth from device to host", self.d2h_bytes_per_s, "bytes/s", "measure it, or set it by flag")
        if self.replicas < 0:
            raise WindowError(f"{self.replicas} replicas are too few; needs 0 or more")
        if self.replicas:
            _positive(
                "bandwidth to the peers", self.replication_bytes_per_s, "bytes/s", "measure it, or set it by flag"
            )
        if not (math.isfinite(self.reserved_d2h_bytes) and self.reserved_d2h_bytes >= 0):
            raise WindowError(
                f"{self.reserved_d2h_bytes} bytes for the boundary log; needs a finite number of 0 or more"
            )
        if self.d2h_bytes <= 0:
            raise WindowError(
                f"the boundary log copies {self.reserved_d2h_bytes:,.0f} bytes in an iteration; copies at "
                f"{self.d2h_bytes_per_s:,.0f} bytes/s for {self.iteration_s} s leave nothing for snapshots; needs more "
                "bandwidth, or no boundary log"
            )

    @property
    def d2h_bytes(self) -> float:
        """Bytes of the largest snapshot that can be copied to the host in an iteration."""
        return self.d2h_bytes_per_s * self.iteration_s - self.reserved_d2h_bytes

    @property
    def replication_bytes(self) -> float:
        """Bytes of the largest snapshot that the network can carry to all peers in an iteration."""
        return self.replication_bytes_per_s * self.iteration_s / self.replicas if self.replicas else math.inf

    @property
    def bytes(self) -> float:
        """Bytes of the largest snapshot that an iteration can both copy to the host and send to all peers."""
        return min(self.d2h_bytes, self.replication_bytes)

    @property
    def binding(self) -> str:
        """Name of the copy that limits the bytes of a snapshot more: ``device to host`` or ``replication``."""
        return "device to host" if self.d2h_bytes <= self.replication_bytes else "replication"

    def copy_s(self, snapshot_bytes: float) -> float:
        """Return the seconds in which a snapshot and the boundary log are copied to the host."""
        return (snapshot_bytes + self.reserved_d2h_bytes) / self.d2h_bytes_per_s

    def send_s(self, snapshot_bytes: float) -> float:
        """Return the seconds in which a snapshot is sent to all peers."""
        return snapshot_bytes * self.replicas / self.replication_bytes_per_s if self.replicas else 0.0

    def stall_s(self, snapshot_bytes: float) -> float:
        """Return the seconds for which training waits until a snapshot is copied to the host.

        A slow network does not stall training. Replication then lags.
        """
        return max(0.0, self.copy_s(snapshot_bytes) - self.iteration_s)


@dataclass(frozen=True, eq=False, slots=True)
class Window:
    """Division of an order of operators into consecutive slots."""

    kind: WindowKind
    ends: tuple[int, ...]
    """Position in the order at which each slot ends; W positions."""
    slot_bytes: npt.NDArray[np.int64]
    """Bytes of each slot on each rank, int64 ``[ranks, W]``."""
    budget_bytes: float
    """Most bytes that a slot may have; infinite if the size of the window was given without a budget."""

    @property
    def size(self) -> int:
        """W, the number of slots, in iterations."""
        return len(self.ends)

    @property
    def over_budget(self) -> tuple[int, ...]:
        """Numbers of the slots whose bytes exceed the budget; training will stall in these slots."""
        return tuple(int(slot) for slot in np.flatnonzero((self.slot_bytes > self.budget_bytes).any(axis=0)))

    @property
    def peak_bytes(self) -> int:
        """Bytes of the largest slot on any rank."""
        return int(self.slot_bytes.max())


def choose_window(table: OperatorTable, order: Order, budget: Budget, kind: WindowKind = WindowKind.ALIGNED) -> Window:
    """Return the smallest window whose slots stay within the budget; the slots have about equal bytes.

    The table has the bytes of one rank, or of all ranks of a stage. A slot must fit on each of these ranks. A job uses
    the largest window that one of its stages needs. The other stages get a window of this size from
    :func:`impose_window`.

    The function lets each slot end as late in the order as the budget allows. This gives the fewest slots: of two slots
    with the same end, the one that begins later has fewer bytes, so a late end is never a disadvantage for the next
    slot.
    """
    cutter = _Cutter(table, order, kind)
    ends = cutter.greedy(budget.bytes)
    if max(cutter.weights(ends)) <= budget.bytes:
        ends = cutter.balanced(len(ends), low=0.0, high=budget.bytes)
    return cutter.window(ends, budget.bytes)


def impose_window(
    table: OperatorTable,
    order: Order,
    size: int,
    kind: WindowKind = WindowKind.ALIGNED,
    budget_bytes: float = math.inf,
) -> Window:
    """Return a window of exactly ``size`` slots with about equal bytes.

    If there are fewer operators than slots, the last slots are empty.

    Raises:
        WindowError: ``size`` is below one.
    """
    if size < 1:
        raise WindowError(f"window has {size} iterations; needs at least 1")
    cutter = _Cutter(table, order, kind)
    slots = min(size, len(table))
    ends = cutter.split_to(slots, cutter.balanced(slots, low=0.0, high=float(cutter.heaviest())))
    return cutter.window(ends + [len(table)] * (size - slots), budget_bytes)


def shortest_period(window_bytes: float, size: int, bytes_to_save: float, most: int) -> int:
    """Return the shortest period of windows for which saving stays within ``bytes_to_save`` per iteration.

    The period is the number of iterations from the beginning of a window to the beginning of the next one. Algorithm 1
    chooses the number of snapshots in a window so that copies from the device stall no iteration. The period may be
    longer than this number. Then links and processors have more iterations for the same bytes.

    Args:
        window_bytes: bytes of all snapshots of a window, on the rank that saves the most.
        size: number of snapshots in a window.
        bytes_to_save: bytes that an iteration may save, as a mean over the period.
        most: longest period in iterations, unless ``size`` is larger.
    """
    period = math.ceil(window_bytes / bytes_to_save - ROUNDING) if bytes_to_save > 0 else most
    return max(size, min(most, period))


def peak_of_window(table: OperatorTable, order: Order, size: int, kind: WindowKind = WindowKind.ALIGNED) -> int:
    """Return the smallest budget, in bytes, for which ``size`` slots are enough; exact to 0.1%."""
    return impose_window(table, order, min(size, len(table)), kind).peak_bytes


class _Cutter:
    """Division of an order of operators into slots.

    ``F`` and ``C`` are the running sums of full and compute bytes along the order of ``n`` operators. A slot from ``s``
    to ``e`` has ``F[e] - F[s] + C[n] - C[e]`` bytes (aligned) or ``F[e] - F[s] + C[n] - (C[e] - C[s])`` bytes
    (rolling). Full state is never smaller than compute weights. So ``G = F - C`` never falls, and bisection finds the
    farthest end of a slot.
    """

    def __init__(self, table: OperatorTable, order: Order, kind: WindowKind) -> None:
        if not _is_permutation(order, len(table)):
            raise WindowError(f"order has {len(order)} entries; it must be a permutation of the {len(table)} operators")
        self._kind = kind
        self._n = len(table)
        self._full = _running_sum(table.full[:, order])
        self._compute = _running_sum(table.compute[:, order])
        self._gain = [row.tolist() for row in self._full - self._compute]

    def _before(self, start: int) -> npt.NDArray[np.int64]:
        """Return the part of a slot's bytes that depends on ``start`` and not on the end, int64 ``[ranks]``."""
        before = self._compute[:, -1] - self._full[:, start]
        return before + self._compute[:, start] if self._kind is WindowKind.ROLLING else before

    def weight(self, start: int, end: int) -> npt.NDArray[np.int64]:
        return self._before(start) + self._full[:, end] - self._compute[:, end]

    def weights(self, ends: Sequence[int]) -> list[int]:
        return [int(self.weight(start, end).max()) for start, end in zip([0, *ends], ends, strict=False)]

    def heaviest(self) -> int:
        return int(self.weight(0, self._n).max())

    def _farthest(self, start: int, budget: float) -> int:
        before = self._before(start).tolist()
        return min(bisect_right(gain, budget - fixed) - 1 for gain, fixed in zip(self._gain, before, strict=True))

    def greedy(self, budget: float, most: int | None = None) -> list[int]:
        """Return the ends of slots. Each slot ends as late as ``budget`` allows, and has at least one operator.

        Args:
            budget: most bytes that a slot may have.
            most: largest number of slots. With ``most``, no slot may exceed ``budget``, and the result is empty if that
                is impossible. Without it, a slot with one operator may exceed ``budget``.
        """
        ends: list[int] = []
        start = 0
        while start < self._n:
            end = self._farthest(start, budget)
            if most is not None and (len(ends) == most or end <= start):
                return []
            start = max(end, start + 1)
            ends.append(start)
        return ends

    def balanced(self, slots: int, low: float, high: float) -> list[int]:
        """Return the ends of at most ``slots`` slots whose largest slot is about as small as possible.

        The function searches for the size of the largest slot between ``low`` and ``high`` bytes. With slots of up to
        ``high`` bytes, ``slots`` slots must be enough.
        """
        best = self.greedy(high, most=slots)
        for _ in range(_BALANCE_STEPS):
            middle = (low + high) / 2
            ends = self.greedy(middle, most=slots)
            low, high, best = (low, middle, ends) if ends else (middle, high, best)
        return best

    def split_to(self, slots: int, ends: list[int]) -> list[int]:
        """Split the largest slots that hold several operators until there are ``slots`` slots; return the new ends."""
        while len(ends) < slots:
            weights = self.weights(ends)
            starts = [0, *ends]
            slot = max((s for s in range(len(ends)) if ends[s] - starts[s] > 1), key=weights.__getitem__)
            ends = [*ends[:slot], (starts[slot] + ends[slot]) // 2, *ends[slot:]]
        return ends

    def window(self, ends: list[int], budget: float) -> Window:
        columns = [self.weight(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        return Window(self._kind, tuple(ends), np.stack(columns, axis=1), budget)


def _is_permutation(order: Order, size: int) -> bool:
    seen = np.zeros(size, dtype=bool)
    if len(order) != size or not ((order >= 0) & (order < size)).all():
        return False
    seen[order] = True
    return bool(seen.all())


def _running_sum(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.zeros((len(values), 1), dtype=np.int64), values.cumsum(axis=1)], axis=1)


def _positive(what: str, value: float, unit: str, remedy: str) -> None:
    if not value > 0 or math.isnan(value):
        raise WindowError(f"{what} is {value} {unit}; needs more than 0: {remedy}")
