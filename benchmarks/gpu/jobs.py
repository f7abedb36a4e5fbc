"""Checks of jobs whose ranks are killed. They train with Megatron on GPUs, and with plain torch on CPUs."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.gpu import shared
from benchmarks.gpu.check import NotRun, Report
from benchmarks.gpu.launched import JobFailed, events, is_equal, pretrain, train_plain
from moevement_core.run.run_record import RunRecord

ITERATIONS, KILLED_AT = 15, 10
SPARSE = ("--moevement-sparse-ckpt", "--moevement-replicas-on-same-node", "--moevement-window", "4")
PHASES = ("forward", "backward", "reduce", "commit", "step", "gather")
PHASES_SHARED = ("backward", "reduce", "step")
"""Phases on a shared GPU, where ranks take turns and an iteration takes seconds."""
MOMENTS = (
    ("failed_at", "interrupted_at", "noticed"), ("interrupted_at", "left_at", "aborted and left"),
    ("left_at", "formed_at", "ranks given out"), ("formed_at", "usable_at", "groups"),
    ("usable_at", "prepared_at", "state found"), ("prepared_at", "replay_at", "loop entered"),
    ("replay_at", "resumed_at", "state recovered"),
)  # fmt: skip
"""Pairs of fields of the failure event, with the name of the time between the two."""
LATE_S = ("0.1", "2.0")
"""Seconds between two checks of the monitoring threads. A longer interval lets a rank notice a failure later."""
REPEATS = 3
AT_ONCE = 3
"""Number of jobs that run at the same time on a shared GPU. No figure there depends on a quiet machine."""
DETERMINISTIC = ("--deterministic-mode",)
FP8 = (
    "--fp8-format",
    "hybrid",
    "--fp8-recipe",
    "delayed",
    "--fp8-amax-history-len",
    "16",
    "--fp8-amax-compute-algo",
    "max",
)


def _train(folder: Path, *words: str, environment: Mapping[str, str] | None = None) -> RunRecord:
    """Train with one spare, on all GPUs, or on two ranks if there is no GPU."""
    if not torch.cuda.is_available():
        plain = [word for word in words if word not in DETERMINISTIC]
        return train_plain(folder, ITERATIONS, "--moevement-window", "4", *plain, nproc=2, spares=1)
    return pretrain(folder, ITERATIONS, *SPARSE, *_layout(), *words, nproc=_ranks(), spares=1, environment=environment)


def _train_killed(folder: Path, *words: str, environment: Mapping[str, str] | None = None) -> RunRecord:
    """Train with the faults in ``words``, and return the record of the run.

    Raises:
        JobFailed: no rank failed, so that a comparison of bits would prove nothing.
    """
    record = _train(folder, *words, environment=environment)
    if not (events(record, "failure") or events(record, "restart")):  # A job restarts if all ranks fail.
        raise JobFailed(f"no rank failed in {folder.name}, in spite of {' '.join(words)}")
    return record


@contextmanager
def _jobs() -> Iterator[ThreadPoolExecutor]:
    """Yield a pool that runs the jobs of a check one after the other, or several at a time on a shared GPU.

    If the check fails, jobs that have not begun do not run.
    """
    pool = ThreadPoolExecutor(AT_ONCE if shared.is_shared() else 1)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _record_of(report: Report, name: str, job: Future[RunRecord]) -> RunRecord | None:
    """Wait for a job, and report whether it goes on after its failures. Return None if it does not.

    A job that fails must not hide the results of the other jobs of its check.
    """
    try:
        record = job.result()
    except (JobFailed, TimeoutError) as error:
        report.figure(f"{name}: end of the job", str(error)[-300:])
        record = None
    report.claim(f"{name}: the job goes on", record is not None)
    return record


def _training_phase() -> str:
    """Return the phase in the middle of an iteration. The trainer in plain torch has no backward phase."""
    return "backward" if torch.cuda.is_available() else "reduce"


def _ranks() -> int:
    """Return the number of ranks: the largest power of two that the GPUs allow, at most 8."""
    if shared.is_shared():
        return shared.RANKS
    return int(max(size for size in (2, 4, 8) if size <= torch.cuda.device_count()))


def _layout() -> tuple[str, ...]:
    """Return flags for two pipeline stages and expert parallelism if there are at least four ranks, else no flags."""
    if _ranks() < 4:
        return ()
    return ("--pipeline-model-parallel-size", "2", "--expert-model-parallel-size", "2")


def _fault(rank: int, phase: str, iteration: int | None = KILLED_AT) -> tuple[str, str]:
    at = "" if iteration is None else f",iteration={iteration}"
    return "--moevement-inject", f"rank={rank},phase={phase}{at}"


def late_monitor(report: Report) -> None:
    """Kill a rank in the last reduction while monitoring threads check rarely, and compare the final state."""
    with tempfile.TemporaryDirectory() as folder, _jobs() as jobs:
        free = jobs.submit(_train, Path(folder, "free"), *DETERMINISTIC)
        if not torch.cuda.is_available():  # the trainer in plain torch has no flag for the monitor
            equal = is_equal(free.result(), _train_killed(Path(folder, "killed"), *_fault(1, "reduce")))
            report.claim("killed while gradients were reduced: equal bits", equal)
            return
        killed = {
            f"a look every {late_s} s, run {number + 1}": jobs.submit(
                _train_killed, Path(folder, f"{late_s}-{number}"), *DETERMINISTIC, *_fault(1, "reduce"),
                "--inprocess-monitor-thread-interval", late_s,
            )
            for late_s in LATE_S for number in range(REPEATS)
        }  # fmt: skip
        for name, job in killed.items():
            if (record := _record_of(report, name, job)) is not None:
                report.claim(f"{name}: equal bits", is_equal(free.result(), record))


def kills(report: Report) -> None:
    """Kill one rank in each phase of an iteration, and measure the parts of the recovery in seconds."""
    phases = PHASES_SHARED if shared.is_shared() else PHASES if torch.cuda.is_available() else ("commit",)
    with tempfile.TemporaryDirectory() as folder, _jobs() as jobs:
        free = jobs.submit(_train, Path(folder, "free"), *DETERMINISTIC)
        killed = {
            phase: jobs.submit(_train_killed, Path(folder, phase), *DETERMINISTIC, *_fault(1, phase))
            for phase in phases
        }
        redone = jobs.submit(
            _train_killed, Path(folder, "redo"), *DETERMINISTIC, "--moevement-recovery", "redo",
            *_fault(1, _training_phase()),
        )  # fmt: skip
        for phase, job in killed.items():
            if (record := _record_of(report, phase, job)) is None:
                continue
            failures = events(record, "failure")
            report.claim(f"{phase}: one failure", len(failures) == 1)
            for event in failures:
                for before, after, name in MOMENTS:
                    report.figure(f"{phase}: {name}", float(str(event[after])) - float(str(event[before])), "s")
            report.claim(f"{phase}: equal bits", is_equal(free.result(), record))
        if (record := _record_of(report, "updates from logged gradients", redone)) is not None:
            report.claim("updates from logged gradients: equal bits", is_equal(free.result(), record))


def second_kill(report: Report) -> None:
    """Kill a second rank while ranks make groups after the first kill, with and without nonblocking communicators."""
    settings: dict[str, dict[str, str]] = {"default": {}}
    if torch.cuda.is_available():
        settings["nonblocking"] = {"TORCH_NCCL_USE_COMM_NONBLOCKING": "1"}
    faults = (*_fault(0, _training_phase()), _fault(1, "groups", None)[1])
    with tempfile.TemporaryDirectory() as folder, _jobs() as jobs:
        started = {
            name: jobs.submit(_train_killed, Path(folder, name), *DETERMINISTIC, *faults, environment=environment)
            for name, environment in settings.items()
        }
        for name, job in started.items():
            if (record := _record_of(report, name, job)) is None:
                continue
            report.claim(f"{name}: the job ends well", bool(events(record, "end")))
            report.figure(f"{name}: failures", len(events(record, "failure")))
            report.figure(f"{name}: restarts because all state was lost", len(events(record, "restart")))


def replacement_bits(report: Report) -> None:
    """Replace a rank on its own device, for several layouts and ways to sum gradients."""
    tensor = ("--tensor-model-parallel-size", "2", "--sequence-parallel", "--expert-tensor-parallel-size", "1")
    settings: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
        "deterministic": (DETERMINISTIC, {}),
        "default": ((), {}),
        "NCCL_ALGO=Ring": ((), {"NCCL_ALGO": "Ring"}),
        "sums in FP32": ((*DETERMINISTIC, "--ddp-reduce-scatter-with-fp32-accumulation"), {}),
        "tensor parallel": ((*DETERMINISTIC, *tensor), {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
    }
    is_gpu = torch.cuda.is_available()
    fault = _fault(1, _training_phase())
    with tempfile.TemporaryDirectory() as folder, _jobs() as jobs:
        pairs: dict[str, tuple[Future[RunRecord], Future[RunRecord]]] = {
            name: (
                jobs.submit(_train, Path(folder, f"{name}-free"), *words, environment=environment),
                jobs.submit(_train_killed, Path(folder, f"{name}-killed"), *words, *fault, environment=environment),
            )
            for name, (words, environment) in (settings.items() if is_gpu else list(settings.items())[:1])
        }
        for name, (free, killed) in pairs.items():
            equal = is_equal(free.result(), killed.result())
            report.figure(f"{name}: equal bits", str(equal))
            if not is_gpu or DETERMINISTIC[0] in settings[name][0]:
                report.claim(f"{name}: equal bits", equal)
    report.figure("another device, another node", "not run: the spare takes the device that was lost")


def fp8_survivors(report: Report) -> None:
    """Kill a rank of a job with delayed scaling, and compare the job with a failure-free job."""
    if importlib.util.find_spec("transformer_engine") is None:
        raise NotRun("Transformer Engine is not installed")
    layers = ("--transformer-impl", "transformer_engine")
    with tempfile.TemporaryDirectory() as folder:
        free, killed = (
            pretrain(
                Path(folder, what), ITERATIONS, *SPARSE, *FP8, *DETERMINISTIC, *more, nproc=_ranks(), spares=1,
                layers=layers,
            )
            for what, more in (("free", ()), ("killed", _fault(1, "backward")))
        )  # fmt: skip
        report.claim("a rank was lost", bool(events(killed, "failure")))
        report.claim("equal bits, and so equal scales", is_equal(free, killed))
