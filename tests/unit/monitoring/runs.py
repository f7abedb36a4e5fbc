"""Run directories as jobs leave them, written without a job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moevement_core.run.account import Account
from moevement_core.run.events import Ended, NothingPersisted, Started
from moevement_core.run.job_entry import JobEntry
from moevement_core.run.outcome import Recovery
from moevement_core.run.run_record import RunRecord

BEGAN_AT = 1_000_000.0
"""Time at which the first iteration began, in seconds since the epoch."""
CHECKPOINTING = {
    "stall_s": 0.25, "copied_bytes": 1000, "replicated_bytes": 2000, "replication_lag": 1, "copies_under_way": 2,
    "persisted_from": 3, "window": 3, "window_snapshots": 3, "windows_abandoned": 1,
    "snapshot_memory_bytes": 4_000_000, "log_bytes": 500,
    "log_memory_bytes": 1_000_000, "on_disk": 5, "disk_written_bytes": 7000, "tokens_owed": 0,
    "overhead": 0.02, "overhead_low": 0.01, "overhead_high": 0.03, "overhead_allowed": 0.025,
    "overhead_copy": 0.004, "overhead_digest": 0.003, "overhead_send": 0.01,
    "overhead_policy": 0.001, "overhead_stall": 0.002, "slowest_rank": 1, "slowest_factor": 1.1, "audit_s": 0.02,
    "audited": 8,
}  # fmt: skip


def line(iteration: int, loss: Any = 2.0, **fields: Any) -> dict[str, Any]:
    """Return the metrics line of an iteration of one second; consecutive iterations have no gap."""
    return {
        "iteration": iteration, "loss": loss, "grad_norm": 1.5, "learning_rate": 0.01, "tokens_per_s": 512.0,
        "iteration_s": 1.0, "time": BEGAN_AT + iteration, **CHECKPOINTING, **fields,
    }  # fmt: skip


RECOVERY = Recovery(
    first=3, until=5, replayed=2, verified_until=5, restored_until=5, recomputed=4, restored=4,
    largest_difference=0.0, losses_until=5, sends=2,
    sources={"memory": 2, "peer": 1}, replayed_by_stage={"0": 0, "1": 2}, redone=0, lost_tokens={}, proportion_lost=0.0,
    proportion_lost_so_far=0.0,
    ranks=[2, 3], fed_bytes=4096, fetch_s=0.1, replay_s=1.0, replay_cpu_s=1.5,
)  # fmt: skip
STANDSTILL = NothingPersisted("no newer window has come to all peers for 9 iterations", 9, 3)


def failure(generation: int = 1, at: float = BEGAN_AT + 5.5, **fields: Any) -> Account:
    """Return the account of a rank's failure, with parts of 0.5, 0.25, 0.25, 1, 0.5 and 1.5 seconds."""
    defaults: dict[str, Any] = {
        "generation": generation, "failures": ["rank 2 (pid 12) was killed by signal 9"], "noticed_by": "by supervisor",
        "scope": "stage 1 of 2 lost its state; only it rolled back", "recovery": RECOVERY.as_dict(), "effective": 0.9,
        "kept": "2 ranks kept their state", "spares": 0, "copies": "all are there",
        "failed_at": at, "interrupted_at": at + 0.5, "left_at": at + 0.75, "formed_at": at + 0.8,
        "usable_at": at + 1.0, "prepared_at": at + 2.0, "replay_at": at + 2.5, "resumed_at": at + 4.0,
    }  # fmt: skip
    return Account(**defaults | fields)


def job(**fields: Any) -> JobEntry:
    """Return the entry of a job of four ranks and a spare; its launcher is on another machine."""
    defaults: dict[str, Any] = {
        "command": "moevement launch --nproc 4 --spares 1 train.py", "began_at": BEGAN_AT - 3.0, "host": "host0",
        "pid": 7, "machine": "another", "started": "1", "hardware": "2 cores", "ranks": 4, "spares": 1,
        "versions": {"moevement": "0.1.0", "torch": "2.13.0"},
    }  # fmt: skip
    return JobEntry(**defaults | fields)


def recovered_run(folder: Path, *, has_ended: bool = True) -> RunRecord:
    """Write the record of ten iterations on two nodes, with a failure after the fifth.

    The recovery took four seconds and repeated two iterations.
    """
    run = RunRecord(folder)
    run.begin({"train_iters": 10, "seed": 1}, first_iteration=1)
    run.write_job(job())
    processes = [
        {"rank": rank, "pid": 10 + rank, "host": f"host{rank // 2}", "node": f"n{rank // 2}", "role": "active"}
        for rank in range(4)
    ]
    run.write_ranks([*processes, {"rank": None, "pid": 99, "host": "host1", "node": "n1", "role": "spare"}])
    run.event(Started(0, 4))
    for iteration in range(1, 11):
        late_s = 4.0 + 2.0 if iteration > 5 else 0.0
        run.metric(**line(iteration, 3.0 - 0.1 * iteration, time=BEGAN_AT + iteration + late_s))
        if iteration == 5:
            run.event(RECOVERY)
            run.event(failure())
            run.event(STANDSTILL)
    if has_ended:
        run.event(Ended(10))
        run.write_summary({"state_digest": {"all": "ab", "parts": {"weights": "c"}, "ranks": []}})
        run.write_job(job(ended_at=BEGAN_AT + 17.0, code=0))
    return run


def append(path: Path, fields: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(fields) + "\n")
