"""State of a run, such as training, silent, recovering or ended, as its run directory shows it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import StrEnum

from moevement_core.monitoring.watched_run import WatchedRun
from moevement_core.util.words import counted

SILENT_S = 30.0
"""Shortest time without a new line of metrics after which a run counts as silent, in seconds."""
SILENT_ITERATIONS = 10


class RunCondition(StrEnum):
    """State of a run in one word."""

    STARTING = "starting"
    TRAINING = "training"
    SILENT = "silent"
    """State without a new iteration for a long time: the run hangs, or was killed without a record of it."""
    RECOVERING = "recovering"
    ENDED = "ended"
    REFUSED = "refused"
    """The run ended before its first iteration."""
    FAILED = "failed"
    KILLED = "killed"
    """The launcher no longer exists, and recorded no end of the run."""


@dataclass(frozen=True)
class RunState:
    """State of a run, with its description."""

    kind: RunCondition
    text: str
    """Description of the state in words."""

    @property
    def style(self) -> str:
        """Color of the description in a terminal."""
        if self.kind in (RunCondition.TRAINING, RunCondition.ENDED):
            return "green"
        return "yellow" if self.kind is RunCondition.STARTING else "bold red"


def state_of(watched: WatchedRun, now: float) -> RunState:
    """Return the state of a run.

    Args:
        watched: the run, as of its last update.
        now: present time, in seconds since the epoch.
    """
    if watched.has_ended:
        return _ended(watched, now)
    figures = watched.figures
    if not figures.iterations:
        return RunState(RunCondition.STARTING, "starting")
    silent_s = now - figures.line.get("time", now)
    patience_s = max(SILENT_S, SILENT_ITERATIONS * (figures.line.get("iteration_s") or 0.0))
    silence = f"no iteration for {duration(silent_s)}" if silent_s > patience_s else ""
    if missing := missing_ranks(watched):
        text = f"recovering: {len(missing)} of {figures.world_size} ranks missing"
        return RunState(RunCondition.RECOVERING, f"{text}, {silence}" if silence else text)
    return RunState(RunCondition.SILENT, silence) if silence else RunState(RunCondition.TRAINING, "training")


def _ended(watched: WatchedRun, now: float) -> RunState:
    job, iterations = watched.job, watched.figures.line.get("iteration", 0)
    if job is None:
        return RunState(RunCondition.ENDED, "ended")
    if job.ended_at is None:
        return RunState(RunCondition.KILLED, f"killed: its launcher (pid {job.pid} on {job.host}) is gone")
    first = next(iter(job.reason.splitlines()), "")
    when = time.strftime("%H:%M:%S", time.localtime(job.ended_at))
    ago = f"{duration(max(0.0, now - job.ended_at))} ago, at {when}"
    if not job.code:
        total = watched.train_iterations
        all_done = total is None or iterations >= total
        return RunState(
            RunCondition.ENDED, f"ended {ago}" + ("" if all_done else f", stopped on request at iteration {iterations}")
        )
    if not watched.figures.iterations:
        return RunState(RunCondition.REFUSED, f"did not start, {ago}: {first}")
    return RunState(RunCondition.FAILED, f"ended with exit code {job.code}, {ago}: {first}")


def missing_ranks(watched: WatchedRun) -> list[int]:
    """Return the ranks that have no process now. The list is empty before the job was formed."""
    world = watched.figures.world_size
    if not watched.processes or world is None:
        return []
    held = {process["rank"] for process in watched.processes if process["role"] == "active"}
    return sorted(set(range(world)) - held)


def left_s(watched: WatchedRun) -> float | None:
    """Return an estimate of the seconds to the end of the run. Return None if the record does not suffice.

    The estimate assumes that failures stay as frequent as they were so far.
    """
    figures, total = watched.figures, watched.train_iterations
    if total is None or figures.mean_iteration_s is None:
        return None
    return max(0, total - figures.line["iteration"]) * figures.mean_iteration_s / (figures.effective or 1.0)


def duration(seconds: float) -> str:
    """Return a duration with one unit, or with two between 2 hours and 2 days: ``45 s``, ``12 min``, ``5 h 10 min``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = int(seconds) // 60
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min" if minutes < 48 * 60 else counted(minutes // 60 // 24, "day")
