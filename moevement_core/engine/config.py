"""Flags that limit the memory and bandwidth of checkpointing, and that choose how a recovery is verified."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from moevement_core.util.flags import AUTO, bandwidth, flag, gigabytes


class Verify(StrEnum):
    """Choice how often ranks compute digests of the whole state, with which a recovery compares the rebuilt state."""

    NOTHING = "nothing"
    WINDOW = "window"
    ITERATION = "iteration"


class KeepOwn(StrEnum):
    """Choice whether a rank keeps its own snapshots after all of its peers have them."""

    ALWAYS = "always"
    NEVER = "never"
    AUTO = "auto"
    """Choice to keep own snapshots until host memory is used up."""


FEWEST_COPIES = 2
"""Copies on peers that a snapshot needs before the rank that captured it may drop it.

With a single copy, the failure of that one peer would leave the rank without a state to roll back to.
"""


@dataclass(frozen=True)
class BudgetConfig:
    """Limits on the host memory and bandwidth that checkpointing uses on one rank."""

    host_memory_bytes: float | None = flag(
        "--moevement-host-memory-gb", type=float, metavar="GB",
        check=lambda name, value: None if value is None else gigabytes(name, value),
        help="host memory that a rank may use for its own snapshots, for copies of other ranks' snapshots, and for its "
        "boundary log (default: half of the node's memory, or of the control group's limit if that is less, divided "
        "among the ranks of the node)",
    )  # fmt: skip
    keep_own: KeepOwn = flag(
        "--moevement-keep-own", choices=[str(kind) for kind in KeepOwn], default=str(KeepOwn.AUTO),
        check=lambda name, value: KeepOwn(value),
        help="whether a rank keeps its own snapshot after all peers have it. always; never; auto: as long as host "
        "memory suffices (default: auto). A stage that rolls back fetches missing snapshots from peers",
    )  # fmt: skip
    d2h_bytes_per_s: float | None = flag(
        "--moevement-bandwidth", default=AUTO, metavar="auto|GB/S", check=bandwidth,
        help="bandwidth of copies from one device to its host (default: auto, measured)",
    )  # fmt: skip
    network_bytes_per_s: float | None = flag(
        "--moevement-network-bandwidth", default=AUTO, metavar="auto|GB/S", check=bandwidth,
        help="bandwidth with which a rank can send copies to all its peers beside training (default: auto, measured)",
    )  # fmt: skip
    log_memory_bytes: float = flag(
        "--moevement-log-memory-gb", type=float, metavar="GB", check=gigabytes,
        help="host memory that a rank may use for its boundary log: copies of the tensors that it sends to other "
        "pipeline stages, from which a single stage can replay (default: the most that a replay may need, but no more "
        "than --moevement-host-memory-gb leaves)",
    )  # fmt: skip


@dataclass(frozen=True)
class VerifyConfig:
    """Choice of the digests with which a recovery compares the rebuilt state."""

    verify: Verify = flag(
        "--moevement-verify", choices=[str(verify) for verify in Verify], default=str(Verify.WINDOW),
        check=lambda name, value: Verify(value),
        help="iterations in which ranks compute a digest of the whole state. A recovery compares the replayed state "
        "with it. nothing: no iteration; window: the last iteration of each window; iteration: every iteration "
        "(default: window)",
    )  # fmt: skip
