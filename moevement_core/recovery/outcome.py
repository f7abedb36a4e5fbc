"""What came of a recovery, for the log, the run's record and the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from moevement_core.words import counted


@dataclass(frozen=True)
class Recovery:
    """How a recovery went; the same on every rank."""

    kind: ClassVar[str] = "recovery"
    first: int
    """The iteration whose state it began from."""
    until: int
    """The iteration whose state it reached."""
    replayed: int
    """Iterations that were run again."""
    verified_until: int | None
    """Up to where the state is verified; None: nothing recomputed was compared, or some operator not at all."""
    restored_until: int | None
    """Up to where every operator was compared, also if nothing but what had just been loaded."""
    recomputed: int
    """Operators that were compared after at least one update; each rank counts those it has state of."""
    restored: int
    """Operators that were compared only as they had been loaded, from bytes whose digests were checked."""
    largest_difference: float
    """The largest difference of a recomputed tensor or loss from the one that was lost, relative to the largest
    magnitude in either, on any rank: 0 unless bits may differ. What is compared by digests alone has no part in it."""
    losses_until: int | None
    """Up to where recomputed losses were compared with the recorded ones."""
    sends: int
    """Iterations of which everything that a rank sends to other stages was compared with what was sent then; of the
    rank with the most."""
    sources: Mapping[str, int]
    """Snapshots from own memory, from peers, made from parity, of a replica's live state, and from files."""
    replayed_by_stage: Mapping[str, int]
    """Iterations that each pipeline stage ran again; a stage that kept its state ran none."""
    redone: int
    """Updates that were made again from logged gradients, on the rank with the most."""
    lost_tokens: Mapping[str, int]
    """By expert that is older than the rest of the state, routed tokens whose updates are lost."""
    proportion_lost: float
    """PLT of MoC-System: of all routed tokens so far, the share that recoveries have lost; the mean over layers."""
    ranks: Sequence[int]
    """Those whose state was restored; the others kept theirs."""
    fed_bytes: int
    """What healthy stages handed to those that replayed."""
    fetch_s: float
    replay_s: float
    replay_cpu_s: float
    """Processor time of all ranks during the replay, those that wait included."""

    def sentence(self) -> str:
        """Return what was done and what is known of it, for the log."""
        came = ", ".join(f"{count} from {name}" for name, count in self.sources.items() if count)
        snapshots = f"snapshots of iteration {self.first} on ({came})"
        losses = f"{self.losses}; " if self.losses else ""
        return (
            f"state of iteration {self.until} restored by {self.scope} from {snapshots}; {self.work} in "
            f"{self.replay_s:.2f} s; {losses}verified: {self.verified}"
        )

    @property
    def losses(self) -> str:
        """What is not in the state any more, in words."""
        lost = sum(self.lost_tokens.values())
        if not lost:
            return ""
        return (
            f"updates by {lost:,} routed tokens are lost, of {len(self.lost_tokens)} experts that are older than the "
            f"rest ({self.proportion_lost:.2%} of all tokens so far, earlier losses included)"
        )

    @property
    def scope(self) -> str:
        """Who was restored, in words."""
        if self.redone and not self.replayed:
            return f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))} alone"
        stages = [stage for stage, count in self.replayed_by_stage.items() if count]
        if not stages:
            return f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))} without a replay"
        every = len(stages) == len(self.replayed_by_stage)
        return "all stages" if every else f"stage {', '.join(stages)} alone"

    @property
    def work(self) -> str:
        """What was done, in words."""
        updates = f"{counted(self.redone, 'update')} from logged gradients, " if self.redone else ""
        return f"{updates}{counted(self.replayed, 'iteration')} replayed"

    @property
    def verified(self) -> str:
        """What is known of the state, in words."""
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
        """For events and the summary."""
        return asdict(self)
