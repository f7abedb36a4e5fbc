"""Failure-free runs that tests compare with; all tests and worker processes share the run of a set of flags.

The reference is training that saves nothing: whatever a checkpointing strategy does, the bits must be those of Megatron
alone. So the flags of this project that do not change the arithmetic are left out, and jobs that differ only in them
share a run. Some tests end their jobs at an iteration that is not known beforehand. For them, one run takes the digest
of its state in every iteration (:func:`failure_free_until`).
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.moevement import worker
from moevement_core.run.run_record import RunRecord
from tests.harness import run_ranks
from tests.training import SCRIPT, train
from tests.training import flags as words

FOLDER_ENV = "MOEVEMENT_TEST_FAILURE_FREE"
"""Environment variable with the folder of the runs; the workers of one test session share it."""

_COMPUTES_OTHERWISE = ("moevement_frozen_kernels", "moevement_expert_slots", "moevement_sums_in_rank_order")
"""Flags of this project that change the order of sums, and so the bits."""


MARGIN = 1.2
"""Factor by which a run with digests is longer than requested, because the next test may request more."""


def failure_free(nproc: int, **flags: Any) -> RunRecord:
    """Return the record of a failure-free run with these flags; the first request trains it.

    Args:
        nproc: number of ranks.
        flags: as for :func:`tests.training.train`; paths among them must exist until the test session ends.
    """
    flags = {name: value for name, value in flags.items() if _changes_training(name)}
    with _locked(nproc, flags) as folder:
        if not folder.exists():
            unfinished = Path(tempfile.mkdtemp(dir=folder.parent))
            train(nproc, unfinished, **flags)
            unfinished.rename(folder)
    return RunRecord(folder)


def failure_free_until(iteration: int, nproc: int, **flags: Any) -> RunRecord:
    """Return the record of a failure-free run with these flags that ends after ``iteration``.

    One run serves all iterations up to its end. A request for a later iteration trains a longer run.

    Args:
        iteration: last iteration of the run, from 1 to ``train_iters``.
        nproc: number of ranks.
        flags: as for :func:`tests.training.train`.
    """
    flags = {name: value for name, value in flags.items() if _changes_training(name)}
    with _locked(nproc, flags | {"each": "iteration"}) as folder:
        runs = sorted(folder.glob("*"), key=lambda path: int(path.name))
        if not runs or int(runs[-1].name) < iteration:
            folder.mkdir(exist_ok=True)
            last = min(math.ceil(MARGIN * iteration), flags["train_iters"])
            unfinished = Path(tempfile.mkdtemp(dir=folder.parent))
            argv = [str(SCRIPT), *words(**flags, exit_interval=last), "--run-dir", str(unfinished)]
            run_ranks(_run_with_digests, nproc, argv, timeout_s=200 + last, init_process_group=False)
            runs.append(unfinished.rename(folder / str(last)))
        whole = RunRecord(runs[-1])
        part = RunRecord(Path(tempfile.mkdtemp(dir=folder.parent)))
    lines = whole.metrics_path.read_text().splitlines(keepends=True)
    part.metrics_path.write_text("".join(lines[:iteration]))
    digests = json.loads((whole.folder / _DIGESTS).read_text())
    assert digests[-1] == whole.summary()["state_digest"], "after an iteration and at the end of the run"
    part.write_summary({**whole.summary(), "iterations": iteration, "state_digest": digests[iteration - 1]})
    return part


def failure_free_digest(nproc: int, **flags: Any) -> str:
    """Return the digest of the final state of :func:`failure_free`."""
    return digest_of(failure_free(nproc, **flags))


def digest_of(record: RunRecord) -> str:
    """Return the digest of the final state of a run."""
    return str(record.summary()["state_digest"]["all"])


_DIGESTS = "digests.json"


def _run_with_digests(argv: list[str]) -> None:
    """Train as one rank, and let the last rank write the job's digest after each iteration to the run directory."""
    from megatron.training import training

    from megatron.moevement import activate
    from megatron.moevement.state_digest import job_digest

    process, digests = activate.process(), list[dict[str, Any]]()
    original = training.training_log

    @functools.wraps(original)
    def training_log(*args: Any, **kwargs: Any) -> Any:
        answer = original(*args, **kwargs)
        digests.append(job_digest(process.job.live))
        return answer

    training.training_log = training_log
    try:
        worker.run_rank(argv)
    finally:
        if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            (Path(argv[-1]) / _DIGESTS).write_text(json.dumps(digests))


@contextmanager
def _locked(nproc: int, flags: dict[str, Any]) -> Iterator[Path]:
    """Yield the folder of the run with these flags, locked so that only one process at a time trains it."""
    key = hashlib.sha256(repr((nproc, sorted(flags.items()))).encode()).hexdigest()[:16]
    folder = Path(os.environ[FOLDER_ENV]) / key
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def _changes_training(name: str) -> bool:
    return not name.startswith("moevement") or name in _COMPUTES_OTHERWISE
