"""Records of ``events.jsonl``: each has the kind of an event, its time, and the fields of its class.

``scripts/events_table.py`` writes ``docs/events.md`` from this file and from the two accounts of a recovery.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol


class Event(Protocol):
    """Record of an event; :class:`~moevement_core.run.outcome.Recovery` and ``Account`` are events too."""

    kind: ClassVar[str]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields in a form that JSON holds."""


class _Plain:
    def as_dict(self) -> dict[str, Any]:
        """Return the fields in a form that JSON holds."""
        return asdict(self)  # type: ignore[call-overload]


@dataclass(frozen=True)
class Started(_Plain):
    """Start of the job."""

    kind: ClassVar[str] = "start"
    iteration: int
    """Iteration whose state the job starts from; 0 for new weights."""
    world_size: int
    """Number of ranks."""


@dataclass(frozen=True)
class Restarted(_Plain):
    """Automatic restart of a job that has lost all its state in memory."""

    kind: ClassVar[str] = "restart"
    iteration: int
    """Iteration whose state the job restarts from."""
    text: str
    """Source of the state, in words."""


@dataclass(frozen=True)
class Resized(_Plain):
    """Continuation of an elastic job with another number of ranks or with replacements, from state in memory."""

    kind: ClassVar[str] = "resized"
    iteration: int
    """Iteration whose state the job continues from."""
    world_before: int
    """Number of ranks before the event."""
    world_size: int
    """Number of ranks after the event."""
    lost: str
    """Failed ranks, in words; empty if no rank failed."""
    moved_bytes: int
    """Bytes of state that ranks sent to each other."""
    digests_equal: int
    """Number of operators whose whole state had equal digests before and after the event and on all replicas; 0 without
    digests."""
    seconds: dict[str, float]
    """Seconds by part. ``until_usable``: from the first failure to usable process groups. ``state``: creation of model
    and optimizer, and transfer of the state. ``until_resumed``: from the transferred state until training continues.
    ``total``: sum of these parts."""

    def sentence(self) -> str:
        """Return the event as a sentence for the log."""
        size = f"{self.world_size} ranks"
        if self.world_size != self.world_before:
            size += f" instead of {self.world_before}"
        proof = f"; digests of {self.digests_equal} operators are unchanged" if self.digests_equal else ""
        return (
            f"{self.lost + '; ' if self.lost else ''}the job continues with {size} from iteration {self.iteration}, "
            f"after {self.seconds['total']:.1f} s; ranks sent {self.moved_bytes / 1e6:.1f} MB of state{proof}"
        )


@dataclass(frozen=True)
class Ended(_Plain):
    """End of the job after its last iteration."""

    kind: ClassVar[str] = "end"
    iteration: int
    """Last iteration of the job."""


@dataclass(frozen=True)
class Evaluated(_Plain):
    """Evaluation of the model on held-out data."""

    kind: ClassVar[str] = "evaluation"
    set: str
    """Name of the data: ``validation`` or ``test``."""
    iteration: int
    """Iteration after which the model was evaluated."""
    loss: float | str | None
    """Loss of the language model; None if there is none. It is the text ``nan``, ``inf`` or ``-inf`` where JSON has no
    number."""


@dataclass(frozen=True)
class CheckpointSaved(_Plain):
    """Dense checkpoint that Megatron has saved."""

    kind: ClassVar[str] = "checkpoint"
    iteration: int
    """Iteration of the saved state."""
    folder: str
    """Folder that ``--save`` names."""


@dataclass(frozen=True)
class CheckpointFailed(_Plain):
    """Dense checkpoint that Megatron could not save; training continues."""

    kind: ClassVar[str] = "checkpoint_failed"
    iteration: int | None
    """Iteration of the state; None if an asynchronous save reported its error later."""
    reason: str
    """Reason of the failure, in words."""


@dataclass(frozen=True)
class WindowPersisted(_Plain):
    """Window that is persisted on every rank, so that the job can be recovered from it."""

    kind: ClassVar[str] = "window"
    first: int
    """Iteration of the first snapshot of the window."""
    size: int
    """Length of the window in iterations."""
    schedule: str
    """Identifier of the schedule of the window."""
    lag: int
    """Iterations from the newest snapshot that all peers have to the newest captured snapshot."""


@dataclass(frozen=True)
class Planned(_Plain):
    """Planned cost of checkpoints on the rank that writes the record, when the job starts or the window changes."""

    kind: ClassVar[str] = "plan"
    iteration: int
    """Iteration from which the plan holds."""
    window: int
    """Iterations from the first snapshot of a window to the first snapshot of the next one."""
    strategy: str
    """Value of ``--moevement-strategy``."""
    copied_bytes: float
    """Bytes per iteration that the rank copies from its device to the host, as a mean over a window."""
    replicated_bytes: float
    """Bytes per iteration that the rank sends to all peers together, as a mean over a window."""
    memory_bytes: int | None
    """Bytes of host memory for own snapshots, for copies or parity of other ranks, and for the boundary log; None
    without a memory cap."""
    memory_limit_bytes: float | None
    """Bytes of host memory that the rank may use; None without a cap."""
    expected_rollback: float
    """Iterations of work that a failure at a random moment costs on average, if replication does not lag."""
    most_replayed: int
    """Most committed iterations that a recovery re-executes, if replication does not lag."""
    snapshots: int | None = None
    """Number of snapshots in a window; None in records of earlier versions."""


@dataclass(frozen=True)
class AboveCap(_Plain):
    """Warning that the cost of saving has stayed above ``--moevement-overhead-cap``."""

    kind: ClassVar[str] = "above_cap"
    text: str
    """Text of the warning."""
    iteration: int
    """Newest committed iteration."""
    overhead: float
    """Measured share of training time that saving costs."""
    error: float
    """Standard error of :attr:`overhead`."""
    cap: float
    """Largest share of training time that saving may cost."""


@dataclass(frozen=True)
class NothingPersisted(_Plain):
    """Warning that no newer window has been persisted for a long time, so that a failure costs more than planned."""

    kind: ClassVar[str] = "nothing_persisted"
    text: str
    """Text of the warning."""
    iterations: int
    """Number of consecutive iterations without a newly persisted window."""
    persisted_from: int | None
    """First iteration of the newest persisted window; None if no window is persisted."""


@dataclass(frozen=True)
class WindowsNotOnDisk(_Plain):
    """Warning that windows could not be written to ``--moevement-persist-dir``."""

    kind: ClassVar[str] = "windows_not_on_disk"
    text: str
    """Text of the warning."""
    failed: int | None = None
    """Number of windows that could not be written so far; None if the whole folder is unusable."""


@dataclass(frozen=True)
class WindowsOnDiskAgain(_Plain):
    """End of a period in which the folder of windows was unusable."""

    kind: ClassVar[str] = "windows_on_disk_again"
    text: str
    """Text of the log message."""


@dataclass(frozen=True)
class RecoveredFromDisk(_Plain):
    """Recovery from a window on disk, because memory and peers lacked snapshots."""

    kind: ClassVar[str] = "recovery_from_disk"
    text: str
    """Text of the warning."""
    window: str
    """Name of the window on disk."""
    until: int
    """Iteration whose state the ranks recovered."""


@dataclass(frozen=True)
class GroupsSplit(_Plain):
    """Warning that a group of ranks that communicate in every layer now spans several nodes."""

    kind: ClassVar[str] = "groups_split"
    ranks: tuple[tuple[int, int], ...]
    """First and last rank of each such group (tensor, context and expert parallel)."""
    nodes: tuple[tuple[str, ...], ...]
    """Nodes of each such group."""


PLAIN = (
    Started, Restarted, Ended, Evaluated, CheckpointSaved, CheckpointFailed, WindowPersisted, Planned, AboveCap,
    NothingPersisted, WindowsNotOnDisk, WindowsOnDiskAgain, RecoveredFromDisk, GroupsSplit,
)  # fmt: skip
