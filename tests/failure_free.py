"""Failure-free runs that tests compare with: one for all tests, and all worker processes, that ask for the same.

The comparison is with training that saves nothing: whatever a checkpointing strategy does, the bits have to be those of
Megatron alone. So flags of this project that do not change what is computed are left out, and jobs that differ in
those alone share one run.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

from moevement_core.run_record import RunRecord
from tests.training import train

FOLDER_ENV = "MOEVEMENT_TEST_FAILURE_FREE"
"""Environment variable with the folder of the runs; the workers of one test session share it."""

_COMPUTES_OTHERWISE = ("moevement_frozen_kernels", "moevement_expert_slots")
"""Flags of this project that change the order of sums, and so the bits."""


def failure_free(nproc: int, **flags: Any) -> RunRecord:
    """Return the record of a failure-free run of these flags; it is made when it is asked for first.

    Args:
        nproc: number of ranks.
        flags: as for :func:`tests.training.train`. Paths among them must exist as long as the test session.
    """
    flags = {name: its for name, its in flags.items() if _changes_training(name)}
    key = hashlib.sha256(repr((nproc, sorted(flags.items()))).encode()).hexdigest()[:16]
    folder = Path(os.environ[FOLDER_ENV]) / key
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            unfinished = Path(tempfile.mkdtemp(dir=folder.parent))
            train(nproc, unfinished, **flags)
            unfinished.rename(folder)
    return RunRecord(folder)


def failure_free_digest(nproc: int, **flags: Any) -> str:
    """Return the digest of the final state of :func:`failure_free`."""
    return digest_of(failure_free(nproc, **flags))


def digest_of(record: RunRecord) -> str:
    """Return the digest of the final state of a run."""
    return str(record.summary()["state_digest"]["all"])


def _changes_training(name: str) -> bool:
    return not name.startswith("moevement") or name in _COMPUTES_OTHERWISE
