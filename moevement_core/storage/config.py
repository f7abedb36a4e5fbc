"""Flags of windows on disk, and of the roll back to one of them after a loss spike."""

from __future__ import annotations

from dataclasses import dataclass

from moevement_core.storage.locations import check_location
from moevement_core.storage.manifest import KEPT, Kept
from moevement_core.util.flags import at_least, flag, more_than

ON_SPIKE, ROLLBACK_BY = "--moevement-rollback-on-spike", "--moevement-rollback-by"
FEWEST_BACK = 2
"""Smallest number of iterations between the state that a job goes back to and the spike.

The loss of iteration t is that of the state of iteration t - 1, so this state may be the bad one.
"""


@dataclass(frozen=True)
class DiskConfig:
    """Configuration of windows on disk: the folders to write to and to load from."""

    persist_dir: str | None = flag(
        "--moevement-persist-dir", metavar="DIR|URL", check=check_location,
        help="folder for persisted windows, which ranks write beside training (default: none). It is either one folder "
        "for the whole job, or a folder on each node, which then also holds the copies that the node's ranks keep for "
        "others; {node} in the name is replaced by the name of the node. Or the URL of an object store, such as "
        "s3://bucket/job",
    )  # fmt: skip
    load: str | None = flag(
        "--moevement-load", metavar="DIR|URL", check=check_location,
        help="folder or object store with windows. The job starts from the newest window if that window restores a "
        "later iteration than the checkpoint of --load. It may be empty, and may be that of --moevement-persist-dir",
    )  # fmt: skip
    load_iteration: int | None = flag(
        "--moevement-load-iteration", type=int, metavar="N", check=at_least(0),
        help="with --moevement-load: start from the window that restores iteration N instead of the newest one; "
        "`moevement windows DIR` lists the windows of a folder",
    )  # fmt: skip
    keep: int = flag(
        "--moevement-keep-windows", type=int, default=KEPT, metavar="K", check=at_least(KEPT),
        help=f"number of newest windows that stay in --moevement-persist-dir (default: {KEPT})",
    )  # fmt: skip
    keep_every: int | None = flag(
        "--moevement-keep-windows-every", type=int, metavar="N", check=at_least(1),
        help="keep in --moevement-persist-dir also the first window of each N iterations, for as long as the folder "
        "exists (default: none)",
    )  # fmt: skip

    @property
    def kept(self) -> Kept:
        """Windows that stay in the folder."""
        return Kept(self.keep, self.keep_every)


@dataclass(frozen=True)
class RollbackConfig:
    """Size of a loss spike after which the job rolls back, and how far it goes back."""

    on_spike: float | None = flag(
        ON_SPIKE, type=float, metavar="FACTOR", check=more_than(1),
        help="roll back once if the loss of an iteration is not finite, or more than FACTOR times the median of the "
        "last 100 iterations: the job restarts from an older window on disk, and leaves out the iterations from there "
        "up to the spike (default: never). Needs --moevement-persist-dir",
    )  # fmt: skip
    by: int | None = flag(
        ROLLBACK_BY, type=int, metavar="N", check=at_least(FEWEST_BACK),
        help=f"with {ON_SPIKE}: go back to the newest window that restores the state at least N iterations before "
        f"the spike, or to the oldest window if there is none (default: {FEWEST_BACK})",
    )  # fmt: skip

    @property
    def is_on(self) -> bool:
        """True if the job rolls back after a loss spike."""
        return self.on_spike is not None
