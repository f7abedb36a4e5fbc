"""What came of a recovery, for the log, the run's record and the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Recovery:
    """How a recovery went; the same on every rank."""

    first: int
    """The iteration whose state it began from."""
    until: int
    """The iteration whose state it reached."""
    replayed: int
    """Iterations that were run again."""
    verified_until: int | None
    """Up to where the state is verified; None: it is not."""
    losses_until: int | None
    """Up to where recomputed losses were compared with the recorded ones."""
    sources: Mapping[str, int]
    """Snapshots from own memory, from peers and from files."""
    replayed_by_stage: Mapping[str, int]
    """Iterations that each pipeline stage ran again; a stage that kept its state ran none."""
    fed_bytes: int
    """What healthy stages handed to those that replayed."""
    fetch_s: float
    replay_s: float
    replay_cpu_s: float
    """Processor time of all ranks during the replay, those that wait included."""

    def sentence(self) -> str:
        """For the log: what was done and what is known of it."""
        came = ", ".join(f"{count} from {name}" for name, count in self.sources.items() if count)
        verified = (
            f"verified up to iteration {self.verified_until}" if self.verified_until is not None else "not verified"
        )
        stages = [stage for stage, count in self.replayed_by_stage.items() if count]
        where = "all stages" if len(stages) == len(self.replayed_by_stage) else f"stage {', '.join(stages)} alone"
        return (
            f"state of iteration {self.until} recovered by {where}: snapshots from {self.first} on ({came}), "
            f"{self.replayed} iterations replayed in {self.replay_s:.2f} s; the state is {verified}"
        )

    def as_dict(self) -> dict[str, Any]:
        """For events and the summary."""
        return asdict(self)
