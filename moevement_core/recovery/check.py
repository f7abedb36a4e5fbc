"""Comparison of a replayed state with digests of the lost state.

Every snapshot has digests of its tensors, and some snapshots have a digest of every operator's whole state. A replay
compares its state with these digests at each iteration that has digests. An operator is *known* up to the newest
iteration at which its whole state was compared and was equal. A rank is known up to the earliest of these iterations
over all of its operators.

An operator is *recomputed* if it was compared after at least one update. An operator is *restored* if its only
comparison was with the snapshot that it was loaded from, before any update. If at least one operator of a rank was
recomputed, the rank counts as *verified* up to the iteration that it is known up to.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from moevement_core.engine.layout import OperatorState
from moevement_core.policy.schedule import Saved
from moevement_core.snapshot.snapshot import Entry, Snapshot, as_bytes, digest_of
from moevement_core.util.iterations import reached_by_all

MOST_TOLD = 20
"""Largest number of differences that are described in words."""
_PIECE = 1 << 24
"""Largest number of elements that are compared at a time, because the device may have little free memory."""


def relative_difference(recomputed: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest difference of two flat tensors, relative to the largest magnitude in either.

    The result is from 0 (equal) to 2 (opposite). It is 2 if a value in one tensor is not finite and the other tensor
    has another value there.

    Args:
        recomputed: recomputed tensor of a floating type, on any device.
        wanted: lost tensor of the same length, on any device.
    """
    difference = scale = 0.0
    for start in range(0, recomputed.numel(), _PIECE):
        here = recomputed[start : start + _PIECE].to(torch.float32)
        there = wanted[start : start + _PIECE].to(recomputed.device).to(torch.float32)
        differs = (here != there) & ~(here.isnan() & there.isnan())
        if not (here[differs].isfinite() & there[differs].isfinite()).all():
            return 2.0
        if differs.any():
            difference = max(difference, float((here[differs].double() - there[differs].double()).abs().max()))
        finite = torch.cat([here[here.isfinite()], there[there.isfinite()]])
        scale = max(scale, float(finite.abs().max()) if finite.numel() else 0.0)
    return difference / scale if difference else 0.0


class StateCheck:
    """Comparison of one rank's replayed state with the state that was lost.

    Args:
        states: live tensors of this rank's operators.
        whole: function that computes a digest of the whole live state of each operator, and returns them by operator.
        enabled: False to compare nothing.
    """

    def __init__(
        self, states: Mapping[str, OperatorState], whole: Callable[[], Mapping[str, str]], *, enabled: bool = True
    ) -> None:
        self.differences: list[str] = []
        """Texts that describe the first :data:`MOST_TOLD` differences."""
        self.differ_as_loaded = False
        """True if an operator differs although it was not updated since it was loaded.

        A loaded state was not computed again, so the arithmetic of another processor cannot explain the difference.
        """
        self.largest_difference = 0.0
        """Largest :func:`relative_difference` of a recomputed tensor or loss from the lost one.

        It is 0 as long as everything that was compared by value is equal.
        """
        self.known: dict[str, int] = {}
        """Newest iteration at which an operator's whole state on this rank was compared and was equal, by operator."""
        self.recomputed: set[str] = set()
        """Operators in :attr:`known` that had been updated since they were loaded."""
        self.losses_until: int | None = None
        """Newest iteration whose losses were compared and were equal; None if there is none."""
        self.sends: set[int] = set()
        """Iterations whose tensors for other stages were compared and were equal."""
        self._whole = whole
        self._enabled = enabled
        self._live = {
            (tensor.operator, tensor.saved, tensor.key): tensor.tensor
            for state in states.values()
            for tensor in (*state.compute, *state.full)
        }
        self._operators = {operator for operator, _, _ in self._live}

    @property
    def known_until(self) -> int | None:
        """Iteration up to which this rank's whole state is checked: the earliest iteration in :attr:`known`.

        None if an operator is missing there, because its whole state was never compared or never equal.
        """
        return reached_by_all(self.known.get(operator) for operator in self._operators)

    @property
    def verified_until(self) -> int | None:
        """Iteration :attr:`known_until` if at least one operator was compared after an update, else None.

        Without an update, the comparison proves only that the snapshots were loaded correctly.
        """
        return self.known_until if self.recomputed else None

    @property
    def restored(self) -> set[str]:
        """Operators whose state was compared only as it was loaded, before any update."""
        return self.known.keys() - self.recomputed

    def compare(self, snapshot: Snapshot, active: frozenset[str], updated: frozenset[str]) -> None:
        """Compare the live state of ``active`` operators with the digests of ``snapshot``.

        Args:
            snapshot: snapshot of the iteration that the replay has reached. Only if a digest differs, this method reads
                the snapshot's tensors.
            active: operators whose full state is loaded.
            updated: operators that were updated at least once since their state was loaded.
        """
        if not self._enabled:
            return
        state = snapshot.header.state
        for operator, entries in self._entries(snapshot, active).items():
            same = all([self._is_same(entry, snapshot) for entry in entries])
            self.differ_as_loaded |= not same and operator not in updated
            if same and entries[0].saved is Saved.FULL:
                self._is_known(operator, state, updated)
        if snapshot.header.whole and self._operators & active:
            digests = self._whole()
            for operator in sorted(self._operators & active & snapshot.header.whole.keys()):
                if digests[operator] == snapshot.header.whole[operator]:
                    self._is_known(operator, state, updated)
                else:
                    self._differs(f"the state of {operator} differs at iteration {state}")
                    self.differ_as_loaded |= operator not in updated

    def _is_known(self, operator: str, state: int, updated: frozenset[str]) -> None:
        self.known[operator] = state
        if operator in updated:
            self.recomputed.add(operator)

    def compare_losses(self, iteration: int, losses: Mapping[str, Any], outcome: Mapping[str, Any] | None) -> None:
        """Compare the losses of a replayed iteration with the losses in ``outcome``, the record of its first execution.

        Does nothing if the record has no losses, as on a rank that does not compute the loss.
        """
        recorded = (outcome or {}).get("losses") or {}
        if not self._enabled or not recorded:
            return
        for name, value in recorded.items():
            # After an overflow, the loss may be NaN, so bits are compared.
            again = torch.as_tensor(losses.get(name, torch.nan)).detach().cpu()
            if again.dtype != value.dtype or not torch.equal(as_bytes(again.clone()), as_bytes(value.clone())):
                self._differs(
                    f"{name} of iteration {iteration} was {float(value):.9g}; the replay computed {float(again):.9g}"
                )
                self._note_difference(again.reshape(-1), value.reshape(-1))
                return
        self.losses_until = iteration

    def compare_sent(self, iteration: int, digest: str | None, outcome: Mapping[str, Any] | None) -> None:
        """Compare what a replayed iteration sent to other stages with the record of its first execution.

        Args:
            iteration: iteration that was replayed.
            digest: digest of all tensors for other stages, including those that a replay does not send again.
            outcome: record of the first execution. If it has no digest, nothing is compared.
        """
        recorded = (outcome or {}).get("sent")
        if not self._enabled or recorded is None or digest is None:
            return
        if digest == recorded:
            self.sends.add(iteration)
        else:
            self._differs(f"tensors sent to other stages differ in iteration {iteration}")

    def _entries(self, snapshot: Snapshot, active: frozenset[str]) -> dict[str, list[Entry]]:
        entries: dict[str, list[Entry]] = defaultdict(list)
        for entry in snapshot.header.entries:
            if entry.operator in active and entry.saved is not Saved.GRADIENT:
                entries[entry.operator].append(entry)
        return entries

    def _is_same(self, entry: Entry, snapshot: Snapshot) -> bool:
        live = self._live.get((entry.operator, entry.saved, entry.key))
        if live is not None and digest_of(live.detach().cpu()) == entry.digest:
            return True
        self._differs(f"{entry.key} of {entry.operator} differs at iteration {snapshot.header.state}")
        if live is not None and live.is_floating_point():
            self._note_difference(live.detach().reshape(-1), snapshot.bytes_of(entry).view(live.dtype))
        return False

    def _note_difference(self, recomputed: torch.Tensor, wanted: torch.Tensor) -> None:
        if recomputed.dtype.is_floating_point and recomputed.numel() == wanted.numel():
            self.largest_difference = max(self.largest_difference, relative_difference(recomputed, wanted))

    def _differs(self, what: str) -> None:
        if len(self.differences) < MOST_TOLD:
            self.differences.append(what)
