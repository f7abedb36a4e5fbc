"""The flags of what checkpointing may use of a rank, and of how it is verified."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from moevement_core.flags import AUTO, bandwidth, flag, gigabytes


class Verify(StrEnum):
    """How often a digest of the whole state is made, for a replayed state to be compared with."""

    NOTHING = "nothing"
    WINDOW = "window"
    ITERATION = "iteration"


class KeepOwn(StrEnum):
    """Whether a rank keeps its own snapshots when all its peers have them."""

    ALWAYS = "always"
    NEVER = "never"
    AUTO = "auto"
    """While host memory allows it."""


FEWEST_COPIES = 2
"""Of a snapshot that its rank does not keep: with one, who loses that peer has no state left to roll back to."""


@dataclass(frozen=True)
class BudgetConfig:
    """What checkpointing may use: host memory and bandwidth of a rank."""

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
    """What a recovery is compared with."""

    verify: Verify = flag(
        "--moevement-verify", choices=[str(verify) for verify in Verify], default=str(Verify.WINDOW),
        check=lambda name, value: Verify(value),
        help="when a digest of the whole state is made, which a recovery compares the replayed state with: never, in "
        "the last iteration of a window, or in every iteration (default: window)",
    )  # fmt: skip
