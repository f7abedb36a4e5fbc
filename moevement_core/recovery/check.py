"""What of a replayed state was compared with digests of the state that was lost, and up to which iteration.

Every snapshot says what its tensors were when it was taken, and some say what every operator's whole state was. A
replay that comes by such an iteration compares. An operator is known up to the newest iteration at which all of its
state was compared, and a state up to the oldest of its operators; nothing is ever called verified beyond that.

What was loaded from a snapshot and is compared with it before any update was only *restored*: its bytes are those that
were captured, and nothing was recomputed. An operator counts as *recomputed* when it was compared after at least one
update; where none was, nothing is called verified.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from moevement_core.engine.layout import OperatorState
from moevement_core.policy.schedule import Saved
from moevement_core.snapshot.agreement import NONE
from moevement_core.snapshot.snapshot import Entry, Snapshot, as_bytes, digest_of

MOST_TOLD = 20
_PIECE = 1 << 24
"""Elements that are subtracted at a time: the device may be full."""


def relative_difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest difference of two flat tensors, relative to the largest magnitude in either.

    From 0 (equal) to 2 (opposite), and 2 where one has a value that is not finite and the other has not the same.

    Args:
        found: of a floating type, on any device.
        wanted: of the same length, on any device.
    """
    difference = scale = 0.0
    for start in range(0, found.numel(), _PIECE):
        here = found[start : start + _PIECE].to(torch.float32)
        there = wanted[start : start + _PIECE].to(found.device).to(torch.float32)
        differs = (here != there) & ~(here.isnan() & there.isnan())
        if not (here[differs].isfinite() & there[differs].isfinite()).all():
            return 2.0
        if differs.any():
            difference = max(difference, float((here[differs].double() - there[differs].double()).abs().max()))
        finite = torch.cat([here[here.isfinite()], there[there.isfinite()]])
        scale = max(scale, float(finite.abs().max()) if finite.numel() else 0.0)
    return difference / scale if difference else 0.0


class StateCheck:
    """Compares on one rank.

    Args:
        states: live tensors of this rank's operators.
        whole: gives the digest of every operator's whole live state.
        enabled: False compares nothing.
    """

    def __init__(
        self, states: Mapping[str, OperatorState], whole: Callable[[], Mapping[str, str]], *, enabled: bool = True
    ) -> None:
        self.differences: list[str] = []
        """In words, the first ones."""
        self.differ_as_loaded = False
        """Whether one of them is of an operator that had not been updated since it was loaded: no other arithmetic of
        another processor explains that."""
        self.largest_difference = 0.0
        """The largest :func:`relative_difference` of a recomputed tensor or loss from the one that was lost; 0 as long
        as all that was compared by its values is the same."""
        self.known: dict[str, int] = {}
        """Of operators with state here: the newest iteration at which all of it was compared and was the same."""
        self.recomputed: set[str] = set()
        """Those of them that had been updated since they were loaded."""
        self.losses_until = NONE
        """The newest iteration whose losses were compared and were the same."""
        self.sends: set[int] = set()
        """Iterations of which everything that was sent to other stages was compared and was the same."""
        self._whole = whole
        self._enabled = enabled
        self._live = {
            (tensor.operator, tensor.saved, tensor.key): tensor.tensor
            for state in states.values()
            for tensor in (*state.compute, *state.full)
        }
        self._operators = {operator for operator, _, _ in self._live}

    @property
    def known_until(self) -> int:
        """The iteration up to which this rank's whole state is known; ``NONE`` if some was never compared."""
        return min((self.known.get(operator, NONE) for operator in self._operators), default=NONE)

    @property
    def verified_until(self) -> int:
        """Likewise, if anything of it was recomputed; ``NONE`` if all was only restored."""
        return self.known_until if self.recomputed else NONE

    @property
    def restored(self) -> set[str]:
        """Operators whose state was compared only before any update."""
        return self.known.keys() - self.recomputed

    def compare(self, snapshot: Snapshot, active: frozenset[str], updated: frozenset[str]) -> None:
        """Compare ``active`` operators, whose live state should be that of ``snapshot``'s iteration.

        Args:
            snapshot: whose digests are compared with; its payload is read only where they differ.
            active: operators whose whole state is live.
            updated: those that were updated at least once since their state was loaded.
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
            found = self._whole()
            for operator in sorted(self._operators & active & snapshot.header.whole.keys()):
                if found[operator] == snapshot.header.whole[operator]:
                    self._is_known(operator, state, updated)
                else:
                    self._differs(f"state of {operator} at iteration {state}")
                    self.differ_as_loaded |= operator not in updated

    def _is_known(self, operator: str, state: int, updated: frozenset[str]) -> None:
        self.known[operator] = state
        if operator in updated:
            self.recomputed.add(operator)

    def compare_losses(self, iteration: int, losses: Mapping[str, Any], outcome: Mapping[str, Any] | None) -> None:
        """Compare the losses of a replayed iteration with the recorded ones, where this rank has both."""
        recorded = (outcome or {}).get("losses") or {}
        if not self._enabled or not recorded:
            return
        for name, value in recorded.items():
            # An overflow's loss may be NaN, which is the same NaN if its bits are.
            again = torch.as_tensor(losses.get(name, torch.nan)).detach().cpu()
            if again.dtype != value.dtype or not torch.equal(as_bytes(again.clone()), as_bytes(value.clone())):
                self._differs(f"{name} of iteration {iteration}: {float(value):.9g}, replayed {float(again):.9g}")
                self._note_difference(again.reshape(-1), value.reshape(-1))
                return
        self.losses_until = iteration

    def compare_sent(self, iteration: int, digest: str | None, outcome: Mapping[str, Any] | None) -> None:
        """Compare what a replayed iteration sent to other stages, or did not send because they have it, with what they
        were sent then, where the record says what that was.
        """
        recorded = (outcome or {}).get("sent")
        if not self._enabled or recorded is None or digest is None:
            return
        if digest == recorded:
            self.sends.add(iteration)
        else:
            self._differs(f"what was sent to other stages in iteration {iteration}")

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
        self._differs(f"{entry.key} of {entry.operator} at iteration {snapshot.header.state}")
        if live is not None and live.is_floating_point():
            self._note_difference(live.detach().reshape(-1), snapshot.bytes_of(entry).view(live.dtype))
        return False

    def _note_difference(self, found: torch.Tensor, wanted: torch.Tensor) -> None:
        if found.dtype.is_floating_point and found.numel() == wanted.numel():
            self.largest_difference = max(self.largest_difference, relative_difference(found, wanted))

    def _differs(self, what: str) -> None:
        if len(self.differences) < MOST_TOLD:
            self.differences.append(what)
