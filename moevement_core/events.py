"""Records of ``events.jsonl``: one for each event, with its kind, its time, and the fields of its class.

``docs/events.md`` is made from this file and the two accounts of a recovery; ``scripts/events_table.py`` writes it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol


class Event(Protocol):
    """Record of an event; :class:`~moevement_core.recovery.outcome.Recovery` and ``Account`` are events, too."""

    kind: ClassVar[str]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields in a form that JSON holds."""


class _Plain:
    def as_dict(self) -> dict[str, Any]:
        """Return the fields in a form that JSON holds."""
        return asdict(self)  # type: ignore[call-overload]


@dataclass(frozen=True)
class Started(_Plain):
    """A start of the job."""

    kind: ClassVar[str] = "start"
    iteration: int
    """The one that it starts from; 0 for the first."""
    world_size: int
    """Ranks."""


@dataclass(frozen=True)
class Restarted(_Plain):
    """The job has started again by itself, because all its state in memory was lost."""

    kind: ClassVar[str] = "restart"
    iteration: int
    """The one that it restarts from."""
    text: str
    """Source of the job's state, in words."""


@dataclass(frozen=True)
class Resized(_Plain):
    """An elastic job has gone on, with another number of ranks or with new ones, from what its ranks had in memory."""

    kind: ClassVar[str] = "resized"
    iteration: int
    """The one that it goes on from."""
    world_before: int
    """Ranks before."""
    world_size: int
    """Ranks now."""
    lost: str
    """Ranks that were lost, in words; empty if none was."""
    moved_bytes: int
    """State that travelled between ranks."""
    digests_equal: int
    """Operators whose whole state had the same digest before and after, and on all replicas; 0 without digests."""
    seconds: dict[str, float]
    """Seconds by part. ``until_usable``: from the first loss to usable process groups; ``state``: model and optimizer
    built, state brought; ``until_resumed``; ``total``.
    """

    def sentence(self) -> str:
        """Return the event as a sentence for the log."""
        size = f"{self.world_size} ranks"
        if self.world_size != self.world_before:
            size += f" instead of {self.world_before}"
        proof = f"; digests of {self.digests_equal} operators are as they were" if self.digests_equal else ""
        return (
            f"{self.lost + '; ' if self.lost else ''}the job goes on with {size} from iteration {self.iteration}, "
            f"after {self.seconds['total']:.1f} s; {self.moved_bytes / 1e6:.1f} MB of state moved{proof}"
        )


@dataclass(frozen=True)
class Ended(_Plain):
    """The job has come to its end."""

    kind: ClassVar[str] = "end"
    iteration: int
    """The last one."""


@dataclass(frozen=True)
class Evaluated(_Plain):
    """An evaluation on held-out data."""

    kind: ClassVar[str] = "evaluation"
    set: str
    """``validation`` or ``test``."""
    iteration: int
    """Iteration after which the placement was made."""
    loss: float | str | None
    """The language model's; the name of a number that JSON has no word for."""


@dataclass(frozen=True)
class CheckpointSaved(_Plain):
    """A dense checkpoint of Megatron's was saved."""

    kind: ClassVar[str] = "checkpoint"
    iteration: int
    """Iteration of the saved state."""
    folder: str
    """Folder that ``--save`` names."""


@dataclass(frozen=True)
class CheckpointFailed(_Plain):
    """A dense checkpoint of Megatron's could not be saved; training goes on."""

    kind: ClassVar[str] = "checkpoint_failed"
    iteration: int | None
    """Iteration of the state; None where an asynchronous save shows its failure later."""
    reason: str
    """Reason in words."""


@dataclass(frozen=True)
class WindowPersisted(_Plain):
    """A sparse window is persisted on every rank: the job can be recovered from it."""

    kind: ClassVar[str] = "window"
    first: int
    """The iteration of its first snapshot."""
    size: int
    """Iterations."""
    schedule: str
    """The id of the schedule that it was made by."""
    lag: int
    """Iterations by which the newest snapshot on all peers trails the newest captured one."""


@dataclass(frozen=True)
class Planned(_Plain):
    """Planned cost of checkpoints of the rank that writes the record, from a start or a change of the window on."""

    kind: ClassVar[str] = "plan"
    iteration: int
    """Iteration from which the plan holds."""
    window: int
    """Iterations from the first snapshot of a window to that of the next."""
    strategy: str
    """Value of ``--moevement-strategy``."""
    copied_bytes: float
    """Bytes from the device to its host, in an iteration, as a mean over a window."""
    replicated_bytes: float
    """Bytes to all peers together, in an iteration, as a mean over a window."""
    memory_bytes: int | None
    """Host memory for its snapshots, for what it keeps for others and for the boundary log; None where there is no cap
    that it had to be compared with."""
    memory_limit_bytes: float | None
    """Host memory that it may use; None: without a cap."""
    expected_rollback: float
    """Iterations that a failure at a random moment costs on average, with replication that does not lag."""
    most_replayed: int
    """Committed iterations that a recovery runs again at most, likewise."""
    snapshots: int | None = None
    """Snapshots of a window; None in records of earlier versions."""


@dataclass(frozen=True)
class AboveCap(_Plain):
    """A warning: what saving costs training is surely more than ``--moevement-overhead-cap`` allows, and stays so."""

    kind: ClassVar[str] = "above_cap"
    text: str
    """The warning."""
    iteration: int
    """The newest one."""
    overhead: float
    """Share of training time that saving costs."""
    error: float
    """Standard error of :attr:`overhead`."""
    cap: float
    """Share of training time that it may cost."""


@dataclass(frozen=True)
class NothingPersisted(_Plain):
    """A warning: no newer window has come to all peers for long, and a failure costs more than it should."""

    kind: ClassVar[str] = "nothing_persisted"
    text: str
    """The warning."""
    iterations: int
    """Number of iterations in a row."""
    persisted_from: int | None
    """Beginning of the newest persisted window; None if there is none."""


@dataclass(frozen=True)
class WindowsNotOnDisk(_Plain):
    """A warning: windows could not be written to ``--moevement-persist-dir``."""

    kind: ClassVar[str] = "windows_not_on_disk"
    text: str
    """The warning."""
    failed: int | None = None
    """Number of failures so far; None while the folder cannot be used at all."""


@dataclass(frozen=True)
class WindowsOnDiskAgain(_Plain):
    """The folder of windows can be used again."""

    kind: ClassVar[str] = "windows_on_disk_again"
    text: str
    """Warning in words."""


@dataclass(frozen=True)
class RecoveredFromDisk(_Plain):
    """A warning: memory and peers did not have what a recovery needed, and a window on disk did."""

    kind: ClassVar[str] = "recovery_from_disk"
    text: str
    """The warning."""
    window: str
    """Name of the window."""
    until: int
    """The iteration that was recovered."""


@dataclass(frozen=True)
class GroupsSplit(_Plain):
    """A warning: ranks that communicate in every layer have come to be on several nodes."""

    kind: ClassVar[str] = "groups_split"
    ranks: tuple[tuple[int, int], ...]
    """First and last rank of each such group (tensor, context and expert parallel)."""
    nodes: tuple[tuple[str, ...], ...]
    """The nodes that each of them is on."""


PLAIN = (
    Started, Restarted, Ended, Evaluated, CheckpointSaved, CheckpointFailed, WindowPersisted, Planned, AboveCap,
    NothingPersisted, WindowsNotOnDisk, WindowsOnDiskAgain, RecoveredFromDisk, GroupsSplit,
)  # fmt: skip
