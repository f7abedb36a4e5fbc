"""What an operator of the job sees of a recovery: one block in the log, one event, and a timeline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

from moevement_core.recovery.outcome import Recovery

PARTS = ("interrupted recoveries", "detect", "abort", "regroup", "set up and fetch", "enter the loop", "replay")
"""Of a recovery, in their order; the first where it was begun more than once."""


@dataclass(frozen=True)
class Account:
    """One recovery, from the failure to the first new iteration. Times are seconds since the epoch, of all ranks the
    latest; the same on every rank.
    """

    kind: ClassVar[str] = "failure"
    generation: int
    failures: Sequence[str]
    """Who failed and how, in words."""
    noticed_by: str
    """By what (supervisor, reset, lease), and how many seconds after the last word of who is lost."""
    failed_at: float
    """When who failed was seen to end, or was heard of for the last time."""
    interrupted_at: float
    """When ranks were interrupted and their communication was aborted."""
    left_at: float
    """When the last one had stopped what it did."""
    formed_at: float
    """When every rank was given out again."""
    usable_at: float
    """When process groups were there again."""
    prepared_at: float
    """When state was found and fetched, and new ranks were built."""
    replay_at: float
    """When the training loop had been entered and the replay began."""
    resumed_at: float
    """When all of the state was there."""
    scope: str
    recovery: Mapping[str, Any] | None
    """What was replayed; None if nothing was lost."""
    effective: float | None
    """Effective training time ratio so far: iterations committed, each once, over the time since the job was formed."""
    kept: str
    """What was compared of the state that ranks kept, in words."""
    spares: int
    copies: str
    """Whether everything is kept as often as it should be."""
    earlier: Sequence[str] = ()
    """Who had failed before, and how, where the recovery from that was interrupted by this failure."""
    first_failed_at: float | None = None
    """When the first of them had; None: there are none."""
    leaving: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each phase in which ranks left the generation that was interrupted, on the slowest rank: ``shut_down``
    connections, ``drain``, ``abort`` communicators, ``unwind`` the main thread, ``collect`` what is left."""
    free_bytes: int | None = None
    """Device memory that was free on the rank with the least, when all had left and before communicators were made
    again (on CPUs: host memory); None if no rank has used a device."""

    def parts(self) -> dict[str, float]:
        """Seconds by part, in order."""
        times = (
            self.first_failed_at, self.failed_at, self.interrupted_at, self.left_at, self.usable_at, self.prepared_at,
            self.replay_at, self.resumed_at,
        )  # fmt: skip
        return {
            name: max(0.0, end - begin)
            for name, (begin, end) in zip(PARTS, pairwise(times), strict=True)
            if begin is not None and end is not None
        }

    @property
    def total_s(self) -> float:
        """From the failure to the resumption; where recoveries were interrupted before, from the first failure."""
        return max(0.0, self.resumed_at - self._began_at)

    @property
    def _began_at(self) -> float:
        return self.failed_at if self.first_failed_at is None else self.first_failed_at

    def lines(self) -> list[str]:
        """The block."""
        parts = "  ".join(f"{name} {seconds:.2f}" for name, seconds in self.parts().items())
        found = Recovery(**self.recovery) if self.recovery is not None else None
        rows = [
            ("failed", "; ".join(self.failures) or "nobody; all ranks restarted"),
            *([("before", f"{'; '.join(self.earlier)}; interrupted the recovery from that")] if self.earlier else ()),
            ("noticed", self.noticed_by),
            ("scope", self.scope),
            ("plan", _plan(found)),
            ("seconds", f"{parts}  = {self.total_s:.2f}"),
            *([("left", self._left)] if self.leaving else ()),
            *([("lost", found.losses)] if found is not None and found.losses else ()),
            ("verified", _verified(found)),
            ("kept", self.kept),
            ("copies", self.copies),
            ("so far", f"{_effective(self.effective)}; {self.spares} spares are left"),
        ]
        return [f"recovery {self.generation}", *(f"  {name:<9} {text}" for name, text in rows)]

    @property
    def _left(self) -> str:
        free = f"; {self.free_bytes / 1e9:.1f} GB of device memory were free" if self.free_bytes is not None else ""
        return "  ".join(f"{name.replace('_', ' ')} {took:.2f}" for name, took in self.leaving.items()) + free

    def as_dict(self) -> dict[str, Any]:
        """For events."""
        return {**asdict(self), "parts": self.parts(), "total_s": self.total_s}


def _plan(found: Recovery | None) -> str:
    if found is None:
        return "no state was lost"
    came = ", ".join(f"{count} from {name}" for name, count in found.sources.items() if count)
    begin = f"from the snapshots of iteration {found.first} on ({came}) to iteration {found.until}"
    redo = f"{found.redone} updates made again by rank {', '.join(map(str, found.ranks))}" if found.redone else ""
    if redo and not found.replayed:
        return f"{begin}; {redo}; no iteration is repeated"
    stages = ", ".join(f"{stage}: {count}" for stage, count in found.replayed_by_stage.items())
    tail = f"iterations replayed by stage {stages}; {found.fed_bytes / 1e6:.1f} MB fed from logs"
    return "; ".join(part for part in (begin, redo, tail) if part)


def _verified(found: Recovery | None) -> str:
    return "nothing was replayed" if found is None else found.verified


def _effective(ratio: float | None) -> str:
    return (
        "effective training time ratio not known yet" if ratio is None else f"effective training time ratio {ratio:.3f}"
    )


def trace_events(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """A timeline in the trace event format that Perfetto opens, from the events of a run."""
    begun: float | None = None
    shown: list[dict[str, Any]] = []
    for event in events:
        begun = event["time"] if begun is None else begun
        if event["event"] != "failure":
            shown.append(
                {"name": event["event"], "ph": "i", "s": "g", "pid": 0, "tid": 0, "ts": _us(event["time"], begun)}
            )
            continue
        at = event["failed_at"] if event.get("first_failed_at") is None else event["first_failed_at"]
        failures = [*event.get("earlier", ()), *event["failures"]]
        shown.append(_slice(f"recovery {event['generation']}", at, event["total_s"], begun, 0, failures))
        for name, seconds in event["parts"].items():
            shown.append(_slice(name, at, seconds, begun, 1, None))
            at += seconds
    return {"traceEvents": shown, "displayTimeUnit": "ms"}


def _slice(name: str, at: float, seconds: float, begun: float, row: int, about: Any) -> dict[str, Any]:
    return {
        "name": name, "ph": "X", "pid": 0, "tid": row, "ts": _us(at, begun), "dur": seconds * 1e6,
        "args": {"failures": about} if about else {},
    }  # fmt: skip


def _us(at: float, begun: float) -> float:
    return (at - begun) * 1e6
