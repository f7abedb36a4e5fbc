"""Events of a run. A line of ``events.jsonl`` has the kind of an event, its time, and the fields of the event's class.

``scripts/events_table.py`` writes ``docs/events.md`` from the classes here, from ``Recovery`` and from ``Account``.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol


class Event(Protocol):
    """Interface of an event. Classes outside this module have it too: :class:`~moevement_core.run.outcome.Recovery` and
    ``Account``.
    """

    kind: ClassVar[str]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields of the event as plain data, which can be encoded as JSON."""


class _Plain:
    def as_dict(self) -> dict[str, Any]:
        """Return the fields of the event as plain data, which can be encoded as JSON."""
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
    """Text that says where the state comes from, for example a dense checkpoint."""


@dataclass(frozen=True)
class Resized(_Plain):
    """Continuation of an elastic job, from state in memory, with another number of ranks or with replacements."""

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
    """Number of operators whose whole state had the same digest before the event, after it, and on all replicas; 0 if
    digests are off."""
    seconds: dict[str, float]
    """Durations in seconds, by part. ``until_usable``: from the first failure to usable process groups. ``state``: to
    create model and optimizer, and to transfer the state. ``until_resumed``: from the end of the transfer until
    training continues. ``total``: sum of these parts."""

    def sentence(self) -> str:
        """Return a sentence for the log that says what the event was."""
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
    """Loss of the language model; None if the evaluation gave no loss. A loss that is not finite is the text ``nan``,
    ``inf`` or ``-inf``, because JSON has no such numbers."""


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
    """Iteration of the state that was to be saved; None if an asynchronous save failed after it had begun."""
    reason: str
    """Reason of the failure, in words."""


@dataclass(frozen=True)
class WindowPersisted(_Plain):
    """Window that has become persisted: all peers of all ranks have its snapshots, so a recovery can use it."""

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
    """Plan for saving, with its cost on the rank that writes ``events.jsonl``. The rank writes this event at the start,
    and when the window changes.
    """

    kind: ClassVar[str] = "plan"
    iteration: int
    """Iteration from which the plan holds."""
    window: int
    """Iterations from the first snapshot of a window to the first snapshot of the next one."""
    strategy: str
    """Value of ``--moevement-strategy``."""
    copied_bytes: float
    """Bytes per iteration that the rank which writes the event copies from its device to the host, as a mean over a
    window."""
    replicated_bytes: float
    """Bytes per iteration that the rank which writes the event sends to all its peers together, as a mean over a
    window."""
    memory_bytes: int | None
    """Bytes of host memory for the snapshots of the rank which writes the event, for its copies or parity of other
    ranks' snapshots, and for its boundary log; None without a memory cap."""
    memory_limit_bytes: float | None
    """Bytes of host memory that the rank which writes the event may use; None without a cap."""
    expected_rollback: float
    """Iterations of work that a failure at a random moment costs on average, if the lag is 0: the iterations that a
    stage executes again, and half an iteration, because the failure interrupts an iteration half way on average."""
    most_replayed: int
    """Largest number of committed iterations that a recovery executes again, if the lag is 0."""
    snapshots: int | None = None
    """Number of snapshots in a window (W); None in events that an earlier version of this project wrote."""


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
    """Standard error of ``overhead``."""
    cap: float
    """Largest share of training time that saving may cost."""


@dataclass(frozen=True)
class NothingPersisted(_Plain):
    """Warning that no window has become persisted for a long time, so that a failure costs more than planned."""

    kind: ClassVar[str] = "nothing_persisted"
    text: str
    """Text of the warning."""
    iterations: int
    """Number of iterations since a window last became persisted."""
    persisted_from: int | None
    """First iteration of the newest persisted window; None if no window is persisted."""


@dataclass(frozen=True)
class WindowsNotOnDisk(_Plain):
    """Warning that windows could not be written to ``--moevement-persist-dir``."""

    kind: ClassVar[str] = "windows_not_on_disk"
    text: str
    """Text of the warning."""
    failed: int | None = None
    """Number of windows that could not be written so far; None if the folder cannot be used at all."""


@dataclass(frozen=True)
class WindowsOnDiskAgain(_Plain):
    """End of a period in which ranks could not write windows to ``--moevement-persist-dir``."""

    kind: ClassVar[str] = "windows_on_disk_again"
    text: str
    """Text of the log message."""


@dataclass(frozen=True)
class RecoveredFromDisk(_Plain):
    """Recovery from a window on disk, because the memory of the remaining ranks did not hold all snapshots needed."""

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
    """First and last rank of each group (tensor, context and expert parallel) that now spans several nodes."""
    nodes: tuple[tuple[str, ...], ...]
    """Nodes of each group in ``ranks``, in the same order."""


@dataclass(frozen=True)
class SlowPlaceFound(_Plain):
    """Warning that a rank or a node is slower than its peers. It is not repeated until the place is fast again."""

    kind: ClassVar[str] = "slow"
    text: str
    """Text of the warning."""
    iteration: int
    """Newest committed iteration."""
    ranks: tuple[int, ...]
    """Slow ranks: one, or those of a slow node."""
    node: str
    """Node of the ranks."""
    devices: tuple[int, ...]
    """Local number of each rank's device; empty on CPUs, and in a job without spares."""
    phase: str
    """Phase in which most time is lost: ``forward and backward pass``, ``update`` or ``sending``."""
    factor: float
    """Time that the rank's own work takes, without waiting for others, divided by that of its peers."""
    is_evicted: bool
    """True if the job has asked to drain the place because of ``--moevement-evict-slow``."""


@dataclass(frozen=True)
class Corrupted(_Plain):
    """Warning that an audit has found wrong results. The ranks are replaced, and the job goes back."""

    kind: ClassVar[str] = "corrupted"
    text: str
    """Text of the warning."""
    iteration: int
    """Iteration at which the wrong result was found."""
    ranks: tuple[int, ...]
    """Ranks with wrong results."""
    nodes: tuple[str, ...]
    """Node of each of these ranks."""
    operators: tuple[str, ...]
    """Operators with wrong results; empty if they are not known."""
    trusted: int
    """Newest iteration whose state the job trusts, and to which it goes back."""
    clean_at: int | None
    """Newest iteration that the stages of these ranks are known to have computed right; None for none."""


@dataclass(frozen=True)
class LossSpiked(_Plain):
    """Warning that the loss has spiked. The job rolls back, unless it has no older window or has rolled back before."""

    kind: ClassVar[str] = "loss_spiked"
    text: str
    """Text of the warning."""
    iteration: int
    """Iteration whose loss spiked."""
    loss: float | str
    """Loss of this iteration; ``nan`` or ``inf`` as text."""
    median: float
    """Median loss of the iterations before."""
    rolls_back: bool
    """True if the job goes back to an older window; the next event ``restart`` names the window and its iteration."""


@dataclass(frozen=True)
class FastAgain(_Plain):
    """End of a period in which a rank or a node was slower than its peers."""

    kind: ClassVar[str] = "fast_again"
    text: str
    """Text of the log message."""
    iteration: int
    """Newest committed iteration."""
    ranks: tuple[int, ...]
    """Ranks that were slow."""
    node: str
    """Node of the ranks."""


PLAIN = (
    Started, Restarted, Resized, Ended, Evaluated, CheckpointSaved, CheckpointFailed, WindowPersisted, Planned,
    AboveCap, NothingPersisted, WindowsNotOnDisk, WindowsOnDiskAgain, RecoveredFromDisk, GroupsSplit,
    SlowPlaceFound, FastAgain, Corrupted, LossSpiked,
)  # fmt: skip
