"""Account of a recovery for people who run jobs: lines in the log, an event in ``events.jsonl``, and a timeline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

from moevement_core.run.outcome import Recovery
from moevement_core.util.words import counted, spares_words

PARTS = ("interrupted recoveries", "detect", "abort", "regroup", "set up and fetch", "enter the loop", "replay")
"""Names of the parts into which an account divides the time of a recovery, in order.

The first part occurs only if the failure interrupted the recovery from an earlier failure.
"""


@dataclass(frozen=True)
class Account:
    """Account of one recovery, from the failure to the moment when training resumes; all ranks have the same account.
    Times are in seconds since the epoch. If ranks reached a moment at different times, the latest time counts.
    """

    kind: ClassVar[str] = "failure"
    generation: int
    failures: Sequence[str]
    """Texts, one for each failed rank: rank, process id and cause of the failure."""
    noticed_by: str
    """Text that says what noticed the failure, such as the supervisor or the lease, and how many seconds after it."""
    failed_at: float
    """Time at which the first failed process ended; if nobody saw its end, the time of its last sign of life."""
    interrupted_at: float
    """Time at which the last survivor was interrupted and began to abort its communication."""
    left_at: float
    """Time at which the last rank had left the interrupted generation."""
    formed_at: float
    """Time at which the coordinator proposed a roster with a process for every rank."""
    usable_at: float
    """Time at which the new process groups were ready."""
    prepared_at: float
    """Time at which ranks had fetched the snapshots of the lost state, and replacements had built the model."""
    replay_at: float
    """Time at which ranks had entered the training loop and the replay began."""
    resumed_at: float
    """Time at which all state was restored, so that training resumed."""
    scope: str
    recovery: Mapping[str, Any] | None
    """Fields of the recovery event; None if no state was lost."""
    effective: float | None
    """Effective training time ratio so far: the time of all committed iterations, each counted once, over the time
    since the first one began. It may be slightly too high, because the coordinator hears of the first commit with a
    delay. None before the first commit."""
    kept: str
    """Text that says for how many survivors the state was compared with the newest snapshot: in whole, in part, or not
    at all."""
    spares: int
    """Number of spares that were ready at ``formed_at``."""
    copies: str
    """Text on copies at peers after the recovery: ``complete``, or how many snapshots ranks still have to send."""
    starting: int = 0
    """Number of spares that supervisors were still starting at ``formed_at``."""
    survivors: str = ""
    """Text that says how many ranks kept their state, and for how many of these the state was compared with digests."""
    earlier: Sequence[str] = ()
    """Texts on earlier failures, in the form of ``failures``; empty unless this failure interrupted a recovery."""
    first_failed_at: float | None = None
    """Time of the first of the failures in ``earlier``; None if there are none."""
    leaving: Mapping[str, float] = field(default_factory=dict)
    """Seconds that the slowest rank took to leave the interrupted generation, by phase: ``shut_down`` connections,
    ``drain`` background threads, ``abort`` communicators, ``unwind`` the main thread, ``collect`` unused memory."""
    free_bytes: int | None = None
    """Free memory in bytes of the rank that had the least: device memory on GPUs, host memory on CPUs. Ranks measure it
    after they have left the interrupted generation and before they create communicators again. None if no rank has
    used a device."""

    def parts(self) -> dict[str, float]:
        """Return the duration of each part of the recovery in seconds, by the names in :data:`PARTS`, in order."""
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
        """Seconds from the failure to the end of the recovery.

        If the failure interrupted an earlier recovery, the seconds count from the first failure.
        """
        return max(0.0, self.resumed_at - self._began_at)

    @property
    def _began_at(self) -> float:
        return self.failed_at if self.first_failed_at is None else self.first_failed_at

    def lines(self, *, is_verbose: bool = False) -> list[str]:
        """Return the lines that rank 0 logs about the recovery; ``is_verbose`` adds details."""
        recovery = Recovery(**self.recovery) if self.recovery is not None else None
        rows = [
            ("failed", "; ".join(self.failures) or "no rank; all ranks restarted"),
            ("before", f"{'; '.join(self.earlier)}; the new failure interrupted that recovery" if self.earlier else ""),
            ("noticed", self.noticed_by),
            ("scope", self.scope),
            ("restored", _restored(recovery)),
            ("replayed", _replayed(recovery)),
            ("seconds", "  ".join(f"{name} {seconds:.2f}" for name, seconds in self.parts().items())),
            ("", f"total {self.total_s:.2f}"),
            ("lost", recovery.losses if recovery is not None else ""),
            ("verified", "nothing to verify: no state was lost" if recovery is None else recovery.verified),
            ("survivors", (self.kept if is_verbose else self.survivors) or self.kept),
            ("copies", self.copies),
            ("spares", spares_words(self.spares, self.starting)),
            ("ETTR", f"{self.effective:.1%} so far" if self.effective is not None else ""),
            ("leaving", self._left if is_verbose and self.leaving else ""),
            ("fed", f"{recovery.fed_bytes / 1e6:.1f} MB of logs" if is_verbose and recovery is not None else ""),
        ]
        return [f"recovery {self.generation}", *(f"  {name:<9} {text}" for name, text in rows if text)]

    @property
    def _left(self) -> str:
        free = f"; {self.free_bytes / 1e9:.1f} GB of memory free" if self.free_bytes is not None else ""
        return "  ".join(f"{name.replace('_', ' ')} {took:.2f}" for name, took in self.leaving.items()) + free

    def as_dict(self) -> dict[str, Any]:
        """Return all fields for ``events.jsonl``, together with the seconds of each part and in total."""
        return {**asdict(self), "parts": self.parts(), "total_s": self.total_s}


def _restored(recovery: Recovery | None) -> str:
    """Return a text that says from which snapshots ranks restored the lost state, and where the snapshots were."""
    if recovery is None:
        return "no state was lost"
    sources = ", ".join(f"{count} from {name}" for name, count in recovery.sources.items() if count)
    return f"iteration {recovery.until}, from snapshots of iteration {recovery.first} and later ({sources})"


def _replayed(recovery: Recovery | None) -> str:
    """Return a text that says how many iterations each stage executed again, and how many updates ranks repeated."""
    if recovery is None:
        return ""
    redone = (
        f"{counted(recovery.redone, 'update')} repeated from logged gradients, by {_ranks(recovery.ranks)}"
        if recovery.redone
        else ""
    )
    stages = {stage: count for stage, count in recovery.replayed_by_stage.items() if count}
    if not stages:
        return redone or "no iteration is repeated"
    spread = ", ".join(f"{count} by stage {stage}" for stage, count in stages.items())
    return "; ".join(filter(None, [f"{counted(recovery.replayed, 'iteration')} ({spread})", redone]))


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


_TRACKS = {"recoveries": 0, "parts of recoveries": 1, "other events": 2, "windows": 3}
"""Rows of the timeline; windows have a separate row, so that they hide no other events."""


def trace_events(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a timeline of the events of a run, in the trace event format that Perfetto opens."""
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
        shown.append(
            _slice(
                name=f"recovery {event['generation']}",
                at=at,
                seconds=event["total_s"],
                begun=begun,
                row=whole,
                about=failures,
            )
        )
        for name, seconds in event["parts"].items():
            shown.append(_slice(name, at, seconds=seconds, begun=begun, row=_TRACKS["parts of recoveries"], about=None))
            at += seconds
    return {"traceEvents": shown, "displayTimeUnit": "ms"}


def _slice(name: str, at: float, seconds: float, begun: float, row: int, about: Any) -> dict[str, Any]:
    return {
        "name": name, "ph": "X", "pid": 0, "tid": row, "ts": _us(at, begun), "dur": seconds * 1e6,
        "args": {"failures": about} if about else {},
    }  # fmt: skip


def _us(at: float, begun: float) -> float:
    return (at - begun) * 1e6
