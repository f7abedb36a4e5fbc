"""Flags that limit the memory and bandwidth of checkpointing, and that choose how a recovery is verified."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from moevement_core.util.flags import AUTO, bandwidth, flag, gigabytes


class Verify(StrEnum):
    """Interval between digests of the whole state, with which a recovery compares the state that it rebuilt."""

    NOTHING = "nothing"
    WINDOW = "window"
    ITERATION = "iteration"


class KeepOwn(StrEnum):
    """Choice that says if a rank keeps its own snapshots after all its peers have received them."""

    ALWAYS = "always"
    NEVER = "never"
    AUTO = "auto"
    """Own snapshots stay until host memory is used up."""


FEWEST_COPIES = 2
"""Copies on peers that a snapshot needs before its own rank may drop it.

With a single copy, the failure of that peer would leave the rank no state to roll back to.
"""


@dataclass(frozen=True)
class BudgetConfig:
    """Limits on the host memory and bandwidth that checkpointing uses on one rank."""

    host_memory_bytes: float | None = flag(
        "--moevement-host-memory-gb", type=float, metavar="GB",
        check=lambda name, value: None if value is None else gigabytes(name, value),
        help="host memory that a rank may use for its snapshots, those it keeps for peers, and its boundary log "
        "(default: half of what its node has, or its control group leaves, divided among the ranks there)",
    )  # fmt: skip
    keep_own: KeepOwn = flag(
        "--moevement-keep-own", choices=[str(kind) for kind in KeepOwn], default=str(KeepOwn.AUTO),
        check=lambda name, value: KeepOwn(value),
        help="whether a rank keeps a snapshot of its own when all its peers have it: always, never, or where host "
        "memory allows it (default: auto); without, a stage that rolls back gets them from peers",
    )  # fmt: skip
    d2h_bytes_per_s: float | None = flag(
        "--moevement-bandwidth", default=AUTO, metavar="auto|GB/S", check=bandwidth,
        help="copies from one device to its host (default: auto, measured)",
    )  # fmt: skip
    network_bytes_per_s: float | None = flag(
        "--moevement-network-bandwidth", default=AUTO, metavar="auto|GB/S", check=bandwidth,
        help="what a rank can send to its peers beside training (default: auto, measured)",
    )  # fmt: skip
    log_memory_bytes: float = flag(
        "--moevement-log-memory-gb", type=float, metavar="GB", check=gigabytes,
        help="host memory that a rank may use to log what it sends to other pipeline stages, from which a single stage "
        "replays (default: what a replay may need, and no more than --moevement-host-memory-gb leaves)",
    )  # fmt: skip


@dataclass(frozen=True)
class VerifyConfig:
    """Choice of the digests that a recovery is compared with."""

    verify: Verify = flag(
        "--moevement-verify", choices=[str(verify) for verify in Verify], default=str(Verify.WINDOW),
        check=lambda name, value: Verify(value),
        help="when a digest of the whole state is made, which a recovery compares the replayed state with: never, in "
        "the last iteration of a window, or in every iteration (default: window)",
    )  # fmt: skip
