"""Checks of the files in a run directory, which may be damaged, or from another version of this project.

Each function returns a description of the first error, or None. The checks skip fields that no code computes with.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

from moevement_core.overhead.fields import FIELDS
from moevement_core.run.account import Account
from moevement_core.run.events import Corrupted, FastAgain, LossSpiked, Planned, Resized, SlowPlaceFound
from moevement_core.run.job_entry import JobEntry
from moevement_core.run.outcome import Recovery

_OF_EVENTS: dict[str, type] = {
    kind.kind: kind for kind in (Account, Corrupted, FastAgain, LossSpiked, Planned, Recovery, Resized, SlowPlaceFound)
}
"""Classes of the events whose fields are checked, by kind; no code computes with the fields of other events."""
_MOST = 1 << 53
"""Upper bound on iterations: from this number on, a float cannot tell neighbouring whole numbers apart."""
_NUMBERS = (
    "time", "iteration_s", "tokens_per_s", "stall_s", "copied_bytes", "replicated_bytes", "replication_lag",
    "copies_under_way", "persisted_from", "window", "window_snapshots", "windows_abandoned",
    "snapshot_memory_bytes", "log_bytes", "log_memory_bytes", "on_disk", "disk_written_bytes", "tokens_owed",
    "slowest_rank", "slowest_factor", "audit_s", "audited", *FIELDS,
)  # fmt: skip
_MAY_BE_NAMED = ("loss", "grad_norm", "learning_rate", "loss_scale", "validation_loss", "test_loss")
"""Fields that may hold ``nan``, ``inf`` or ``-inf`` as text, because JSON has no such numbers."""
_OF_SPARSE = ("copied_bytes", "replicated_bytes", "snapshot_memory_bytes", "log_memory_bytes")
"""Fields that a line of ``metrics.jsonl`` has if ranks save snapshots. A line has all of these fields or none."""
_COST = (
    "stall_s", "stall_share", "training_thread_s", "training_thread_share", "copied_bytes", "replicated_bytes",
    "windows", "window", "windows_abandoned", "memory_bytes",
)  # fmt: skip


def line_complaint(line: Mapping[str, Any]) -> str | None:
    """Return a description of the error in a line of ``metrics.jsonl``; None if the line is valid."""
    iteration: Any = line.get("iteration")
    if "iteration" not in line:
        return "the line has no iteration; another version wrote it"
    if not isinstance(iteration, int) or not _is_whole(iteration) or not 0 <= iteration < _MOST:
        return f"iteration is {_shown(iteration)}; needs a whole number"
    if "copied_bytes" in line and (missing := _missing(line, _OF_SPARSE)):
        return f"the line has no {missing[0]}; another version wrote it"
    return _numbers(line)


def event_complaint(event: Mapping[str, Any]) -> str | None:
    """Return a description of the error in a line of ``events.jsonl``; None if the line is valid."""
    kind = event.get("event")
    if not isinstance(kind, str):
        return f"event is {_shown(kind)}; needs the name of an event"
    if not _is_number(event.get("time")):
        return f"time is {_shown(event.get('time'))}; needs a number"
    world_size = event.get("world_size")
    if world_size is not None and not _is_whole(world_size):
        return f"world_size is {_shown(world_size)}; needs a whole number"
    if kind not in _OF_EVENTS:
        return None
    if complaint := _fields_of(_OF_EVENTS[kind], event):
        return f"{kind}: {complaint}"
    if kind == Account.kind:
        return _account(event)
    if kind == Resized.kind and "total" not in event["seconds"]:
        return "resized: seconds has no total; another version wrote it"
    return None


def summary_complaint(summary: Any) -> str | None:
    """Return a description of the error in ``summary.json``; None if it is valid."""
    digest = summary.get("state_digest") if isinstance(summary, dict) else None
    if not isinstance(digest, dict) or _missing(digest, ("all", "parts", "ranks")):
        return "the file has no state_digest; another version wrote it"
    ranks = digest["ranks"]
    if not isinstance(digest["all"], str) or not isinstance(digest["parts"], dict):
        return "the state_digest is not valid; the file was damaged after writing"
    if not isinstance(ranks, list) or not all(isinstance(rank, dict) for rank in ranks):
        return "the state_digest has no ranks; the file was damaged after writing"
    environments = summary.get("environment", [])
    if not isinstance(environments, list) or not all(isinstance(entry, dict) for entry in environments):
        return "the environment is not valid; the file was damaged after writing"
    checkpointing = summary.get("checkpointing")
    if checkpointing is not None:
        if not isinstance(checkpointing, dict) or not all(_is_number(checkpointing.get(name)) for name in _COST):
            return "the field checkpointing lacks numbers; another version wrote the file"
        recoveries = checkpointing.get("recoveries")
        if not isinstance(recoveries, list) or any(_fields_of(Recovery, recovery) for recovery in recoveries):
            return "the recoveries are not valid; another version wrote the file"
    return _numbers(summary)


def processes_complaint(processes: Any) -> str | None:
    """Return a description of the error in ``ranks.json``; None if it is valid."""
    if not isinstance(processes, list):
        return f"the file holds {type(processes).__name__}, not a list; it was damaged after writing"
    for process in processes:
        if not isinstance(process, dict) or process.get("role") not in ("active", "spare", "starting"):
            return f"{_shown(process)} is no process; the file was damaged after writing"
        if not isinstance(process.get("host"), str) or not isinstance(process.get("node", ""), str):
            return f"host of a process is {_shown(process.get('host'))}; needs a name"
        if process["role"] == "active" and not _is_whole(process.get("rank")):
            return f"rank of a process is {_shown(process.get('rank'))}; needs a whole number"
    return None


def job_complaint(job: Any) -> str | None:
    """Return a description of the error in ``job.json``; None if it is valid."""
    if complaint := _fields_of(JobEntry, job):
        return complaint
    if job.get("ended_at") is not None and job.get("code") is None:
        return "the job has ended but has no exit code; the file was damaged after writing"
    return None


def refused_connections_complaint(refused: Any) -> str | None:
    """Return a description of the error in ``refused_connections.json``; None if it is valid."""
    count = refused.get("connections") if isinstance(refused, dict) else None
    if not isinstance(count, int) or not _is_whole(count) or count < 0:
        return f"{_shown(refused)} is no count; the file was damaged after writing"
    return None


def _account(event: Mapping[str, Any]) -> str | None:
    parts = event.get("parts")
    if not isinstance(parts, dict) or not all(map(_is_number, parts.values())):
        return "failure: the event has no parts; another version wrote it"
    if not _is_number(event.get("total_s")):
        return f"failure: total_s is {_shown(event.get('total_s'))}; needs a number"
    if event["recovery"] is not None and (complaint := _fields_of(Recovery, event["recovery"])):
        return f"failure: recovery: {complaint}"
    return None


def _numbers(fields: Mapping[str, Any]) -> str | None:
    for name in (*_NUMBERS, *_MAY_BE_NAMED):
        value = fields.get(name)
        if value is None or _is_number(value) or (name in _MAY_BE_NAMED and value in ("nan", "inf", "-inf")):
            continue
        return f"{name} is {_shown(value)}; needs a number"
    return None


def _fields_of(kind: type, fields: Any) -> str | None:
    """Return a description of the error in fields of the dataclass ``kind``; None if they are valid."""
    if not isinstance(fields, Mapping):
        return f"{_shown(fields)} is not an object with fields"
    for name, (wanted, is_optional) in _annotated(kind).items():
        if name not in fields:
            if is_optional:
                continue
            return f"the field {name} is missing; another version wrote it"
        if not _fits(fields[name], wanted):
            return f"{name} is {_shown(fields[name])}; needs {getattr(wanted, '__name__', wanted)}"
    return None


@cache
def _annotated(kind: type) -> dict[str, tuple[Any, bool]]:
    """Return, for each field of a dataclass, its type, and True if the field has a default and so may be missing."""
    hints = typing.get_type_hints(kind)
    return {
        field.name: (hints[field.name], field.default is not dataclasses.MISSING)
        for field in dataclasses.fields(kind)
    }  # fmt: skip


def _fits(value: Any, wanted: Any) -> bool:
    if wanted is Any:
        return True
    origin, inner = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, kind) for kind in inner)
    if origin in (Mapping, dict):
        return isinstance(value, dict) and all(_fits(item, inner[1]) for item in value.values())
    if origin in (Sequence, list, tuple):
        return isinstance(value, list) and all(_fits(item, inner[0]) for item in value)
    if wanted is int:
        return _is_whole(value)
    if wanted is float:
        return _is_number(value)
    return isinstance(value, wanted)


def _missing(fields: Mapping[str, Any], names: Collection[str]) -> list[str]:
    return [name for name in names if name not in fields]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63


def _is_number(value: Any) -> bool:
    return _is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
