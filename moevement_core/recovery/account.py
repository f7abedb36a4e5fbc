"""What an operator of the job sees of a recovery: one block in the log, one event, and a timeline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

from moevement_core.recovery.outcome import Recovery
from moevement_core.words import counted, spares_words

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
    """Spares that were ready when the job was formed again."""
    copies: str
    """Whether everything is kept as often as it should be."""
    starting: int = 0
    """Spares that were being started then, in the place of processes that ended."""
    survivors: str = ""
    """How many ranks kept their state, and how many of these were compared, in words."""
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

    def lines(self, *, is_verbose: bool = False) -> list[str]:
        """Return the block in the log; with all that is known of the recovery if ``is_verbose``."""
        found = Recovery(**self.recovery) if self.recovery is not None else None
        rows = [
            ("failed", "; ".join(self.failures) or "no rank; all ranks restarted"),
            ("before", f"{'; '.join(self.earlier)}; this failure interrupted that recovery" if self.earlier else ""),
            ("noticed", self.noticed_by),
            ("scope", self.scope),
            ("restored", _restored(found)),
            ("replayed", _replayed(found)),
            ("seconds", "  ".join(f"{name} {seconds:.2f}" for name, seconds in self.parts().items())),
            ("", f"total {self.total_s:.2f}"),
            ("lost", found.losses if found is not None else ""),
            ("verified", "nothing to verify: no state was lost" if found is None else found.verified),
            ("survivors", (self.kept if is_verbose else self.survivors) or self.kept),
            ("copies", self.copies),
            ("spares", spares_words(self.spares, self.starting)),
            ("ETTR", f"{self.effective:.1%} so far" if self.effective is not None else ""),
            ("leaving", self._left if is_verbose and self.leaving else ""),
            ("fed", f"{found.fed_bytes / 1e6:.1f} MB from logs" if is_verbose and found is not None else ""),
        ]
        return [f"recovery {self.generation}", *(f"  {name:<9} {text}" for name, text in rows if text)]

    @property
    def _left(self) -> str:
        free = f"; {self.free_bytes / 1e9:.1f} GB of memory free" if self.free_bytes is not None else ""
        return "  ".join(f"{name.replace('_', ' ')} {took:.2f}" for name, took in self.leaving.items()) + free

    def as_dict(self) -> dict[str, Any]:
        """For events."""
        return {**asdict(self), "parts": self.parts(), "total_s": self.total_s}


def _restored(found: Recovery | None) -> str:
    """From which snapshots, and where they were."""
    if found is None:
        return "no state was lost"
    came = ", ".join(f"{count} from {name}" for name, count in found.sources.items() if count)
    return f"iteration {found.until}, from snapshots of iteration {found.first} on ({came})"


def _replayed(found: Recovery | None) -> str:
    """What was run again, and by which stages."""
    if found is None:
        return ""
    redone = (
        f"{counted(found.redone, 'update')} from logged gradients, by {_ranks(found.ranks)}" if found.redone else ""
    )
    stages = {stage: count for stage, count in found.replayed_by_stage.items() if count}
    if not stages:
        return redone or "no iteration is repeated"
    spread = ", ".join(f"{count} by stage {stage}" for stage, count in stages.items())
    return "; ".join(filter(None, [f"{counted(found.replayed, 'iteration')} ({spread})", redone]))


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


_TRACKS = {"recoveries": 0, "parts of recoveries": 1, "other events": 2, "windows": 3}
"""Rows of the timeline; windows have one of their own, where they bury nothing."""


def trace_events(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a timeline in the trace event format that Perfetto opens, from the events of a run."""
    begun: float | None = None
    shown: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": track, "args": {"name": name}}
        for name, track in _TRACKS.items()
    ]
    for event in events:
        begun = event["time"] if begun is None else begun
        if event["event"] != "failure":
            track = _TRACKS["windows" if event["event"] == "window" else "other events"]
            shown.append(
                {"name": event["event"], "ph": "i", "s": "t", "pid": 0, "tid": track, "ts": _us(event["time"], begun)}
            )
            continue
        at = event["failed_at"] if event.get("first_failed_at") is None else event["first_failed_at"]
        failures = [*event.get("earlier", ()), *event["failures"]]
        whole = _TRACKS["recoveries"]
        shown.append(_slice(f"recovery {event['generation']}", at, event["total_s"], begun, whole, failures))
        for name, seconds in event["parts"].items():
            shown.append(_slice(name, at, seconds, begun, _TRACKS["parts of recoveries"], None))
            at += seconds
    return {"traceEvents": shown, "displayTimeUnit": "ms"}


def _slice(name: str, at: float, seconds: float, begun: float, row: int, about: Any) -> dict[str, Any]:
    return {
        "name": name, "ph": "X", "pid": 0, "tid": row, "ts": _us(at, begun), "dur": seconds * 1e6,
        "args": {"failures": about} if about else {},
    }  # fmt: skip


def _us(at: float, begun: float) -> float:
    return (at - begun) * 1e6
