"""Outcome of a recovery, for the log, the record of the run, and the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from moevement_core.util.words import counted


@dataclass(frozen=True)
class Recovery:
    """Outcome of a recovery; the same on every rank."""

    kind: ClassVar[str] = "recovery"
    first: int
    """Iteration whose state the recovery began from."""
    until: int
    """Iteration whose state the recovery reached."""
    replayed: int
    """Number of iterations that were executed again."""
    verified_until: int | None
    """Iteration up to which the state is verified; None if no recomputed state, or not every operator, was compared."""
    restored_until: int | None
    """Iteration up to which every operator was compared, even if only as it was loaded; None if not every one was."""
    recomputed: int
    """Operators that were compared after at least one update; each rank counts the operators that it holds state of."""
    restored: int
    """Operators that were compared only as they were loaded, from bytes whose digests were checked."""
    largest_difference: float
    """Largest difference of a recomputed tensor or loss from the lost one, on any rank, relative to the largest
    magnitude in either: 0 unless bits may differ. Comparisons by digest alone do not count."""
    losses_until: int | None
    """Iteration up to which recomputed losses were compared with the recorded ones; None if none were."""
    sends: int
    """Iterations of which everything sent to other stages was compared with the first execution, on the rank with the
    most."""
    sources: Mapping[str, int]
    """Number of snapshots by source: own memory, peers, parity, a replica's live state, and files."""
    replayed_by_stage: Mapping[str, int]
    """Iterations that each pipeline stage executed again; 0 for a stage that kept its state."""
    redone: int
    """Updates that were repeated from logged gradients, on the rank with the most."""
    lost_tokens: Mapping[str, int]
    """Routed tokens whose updates are lost, by expert that is older than the rest of the state."""
    proportion_lost: float
    """PLT of MoC-System: share of all routed tokens so far that recoveries have lost, as a mean over layers."""
    ranks: Sequence[int]
    """Ranks whose state was restored; the other ranks kept their state."""
    fed_bytes: int
    """Bytes that healthy stages sent to replaying stages from their logs."""
    fetch_s: float
    replay_s: float
    replay_cpu_s: float
    """Processor seconds of all ranks during the replay, waiting ranks included."""

    def sentence(self) -> str:
        """Return a sentence for the log: the work that was done, and how far it is verified."""
        sources = ", ".join(f"{count} from {name}" for name, count in self.sources.items() if count)
        snapshots = f"snapshots of iteration {self.first} on ({sources})"
        losses = f"{self.losses}; " if self.losses else ""
        return (
            f"state of iteration {self.until} restored by {self.scope} from {snapshots}; {self.work} in "
            f"{self.replay_s:.2f} s; {losses}verified: {self.verified}"
        )

    @property
    def losses(self) -> str:
        """Text on the updates that are lost; empty if none are."""
        lost = sum(self.lost_tokens.values())
        if not lost:
            return ""
        return (
            f"updates by {lost:,} routed tokens are lost, of {len(self.lost_tokens)} experts that are older than the "
            f"rest ({self.proportion_lost:.2%} of all tokens so far, earlier losses included)"
        )

    @property
    def scope(self) -> str:
        """Text on the ranks or stages that were restored."""
        if self.redone and not self.replayed:
            return f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))} alone"
        stages = [stage for stage, count in self.replayed_by_stage.items() if count]
        if not stages:
            return f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))} without a replay"
        every = len(stages) == len(self.replayed_by_stage)
        return "all stages" if every else f"stage {', '.join(stages)} alone"

    @property
    def work(self) -> str:
        """Text on the updates and iterations that were repeated."""
        updates = f"{counted(self.redone, 'update')} from logged gradients, " if self.redone else ""
        return f"{updates}{counted(self.replayed, 'iteration')} replayed"

    @property
    def verified(self) -> str:
        """Text on the parts of the state that were compared, and the result."""
        parts, how = self.recomputed + self.restored, f"{self.recomputed} by recomputing, {self.restored} by checksum"
        if self.verified_until is None:
            return f"not verified; {parts} parts of the state were compared ({how})"
        sent = f", and so has what {counted(self.sends, 'iteration')} sent to other stages" if self.sends else ""
        if self.largest_difference:
            return (
                f"{parts} parts of the state were compared with those before the failure ({how}); the largest relative "
                f"difference is {self.largest_difference:.1e}"
            )
        until = "" if self.verified_until == self.until else f", up to iteration {self.verified_until}"
        return f"all {parts} parts of the state have the bits they had before the failure ({how}){sent}{until}"

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for the event and the summary."""
        return asdict(self)
