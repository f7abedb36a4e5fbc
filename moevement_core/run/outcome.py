"""Outcome of a recovery: what ranks restored, repeated and verified; shown in the log, run record and reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from moevement_core.util.words import counted


@dataclass(frozen=True)
class Recovery:
    """Outcome of a recovery: what ranks restored, repeated and verified. All ranks have the same outcome."""

    kind: ClassVar[str] = "recovery"
    first: int
    """Iteration of the first snapshot that the recovery loaded."""
    until: int
    """Iteration whose state the recovery reached."""
    replayed: int
    """Number of iterations that a stage executed again; the largest number over all stages."""
    verified_until: int | None
    """Iteration up to which the restored state is verified: equal to digests from before the failure. None if any
    operator was never compared, or if no operator was compared after a repeated update."""
    restored_until: int | None
    """Iteration up to which every operator was compared with digests from before the failure. Operators that were
    compared only as loaded, before any repeated update, count too. None if any operator was never compared."""
    recomputed: int
    """Number of operators that were compared with digests after at least one repeated update, as a sum over ranks."""
    restored: int
    """Number of operators that were compared with digests only as loaded, before any repeated update, as a sum over
    ranks."""
    largest_difference: float
    """Largest difference on any rank between a recomputed tensor or loss and the lost one, relative to the largest
    magnitude in either of them. It is 0 if the recovery has to restore equal bits, because a difference then ends the
    recovery. State that is compared by digest alone does not count."""
    losses_until: int | None
    """Iteration up to which losses of repeated iterations were compared with the recorded losses; None if no losses
    were compared."""
    sends: int
    """Number of repeated iterations in which the tensors that a rank sent to other stages were compared with those of
    the first execution; the largest number over all ranks."""
    sources: Mapping[str, int]
    """Number of loaded snapshots by source: memory of the rank itself, peers, parity, files, and the state of a live
    data-parallel replica."""
    replayed_by_stage: Mapping[str, int]
    """Number of iterations that each pipeline stage executed again; 0 for a stage that kept its state."""
    redone: int
    """Number of updates that a rank repeated from logged gradients; the largest number over all ranks."""
    lost_tokens: Mapping[str, int]
    """Number of routed tokens whose updates are lost, for each expert that was restored to an older iteration than the
    rest of the state."""
    proportion_lost: float
    """Proportion of lost tokens (PLT of MoC-System, equation 7): lost share of the routed tokens of the whole run, as a
    mean over layers. If the trainer does not know the length of the run, it is the lost share of all tokens so far."""
    proportion_lost_so_far: float
    """Share of all routed tokens so far that recoveries have lost, as a mean over layers."""
    ranks: Sequence[int]
    """Ranks whose state was restored; the other ranks kept their state."""
    fed_bytes: int
    """Bytes that stages outside the scope sent from their boundary logs to stages that replayed."""
    fetch_s: float
    replay_s: float
    replay_cpu_s: float
    """Processor time in seconds that all ranks together used during the replay, including ranks that only waited."""

    def sentence(self) -> str:
        """Return a sentence for the log that says what was restored and repeated, and how far it is verified."""
        sources = ", ".join(f"{count} from {name}" for name, count in self.sources.items() if count)
        snapshots = f"snapshots of iteration {self.first} and later ({sources})"
        losses = f"{self.losses}; " if self.losses else ""
        return (
            f"state of iteration {self.until} restored by {self.scope} from {snapshots}; {self.work} in "
            f"{self.replay_s:.2f} s; {losses}verification: {self.verified}"
        )

    @property
    def losses(self) -> str:
        """Text that says how many updates are lost; empty if none are."""
        lost = sum(self.lost_tokens.values())
        if not lost:
            return ""
        return (
            f"updates by {lost:,} routed tokens are lost, because {len(self.lost_tokens)} experts are older than the "
            f"rest of the state ({self.proportion_lost:.2%} of the run's tokens, {self.proportion_lost_so_far:.2%} of "
            "those so far, including earlier losses)"
        )

    @property
    def scope(self) -> str:
        """Text that says which ranks or stages were restored."""
        if self.redone and not self.replayed:
            return f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))} alone"
        stages = [stage for stage, count in self.replayed_by_stage.items() if count]
        if not stages:
            return f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))} without a replay"
        every = len(stages) == len(self.replayed_by_stage)
        return "all stages" if every else f"stage {', '.join(stages)} alone"

    @property
    def work(self) -> str:
        """Text that says how many updates and iterations were repeated."""
        updates = f"{counted(self.redone, 'update')} repeated from logged gradients, " if self.redone else ""
        return f"{updates}{counted(self.replayed, 'iteration')} replayed"

    @property
    def verified(self) -> str:
        """Text that says how many operators were compared with digests, and with which result."""
        parts, how = self.recomputed + self.restored, f"{self.recomputed} by recomputing, {self.restored} by checksum"
        if self.verified_until is None:
            return f"not verified; {parts} parts of the state were compared ({how})"
        sent = f"; sends of {counted(self.sends, 'iteration')} to other stages are equal too" if self.sends else ""
        if self.largest_difference:
            return (
                f"{parts} parts of the state were compared with those before the failure ({how}); the largest relative "
                f"difference is {self.largest_difference:.1e}"
            )
        until = "" if self.verified_until == self.until else f"; verified up to iteration {self.verified_until}"
        return f"all {parts} parts of the state have the same bits as before the failure ({how}){sent}{until}"

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for ``events.jsonl`` and ``summary.json``."""
        return asdict(self)
