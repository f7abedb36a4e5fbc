"""Start the ranks of a training script: all of them on this host, or this one under Slurm.

On this host ranks are started and watched by torch's elastic multiprocessing. Where no GPU is they are forked from a
process that has imported Megatron once, which on two cores saves most of the start; with a GPU, or where asked for,
each rank is a fresh interpreter.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil

from megatron.moevement import config_file
from megatron.moevement.runtime.store import STORE_ENV
from moevement_core.cli.exit_codes import USAGE_ERROR
from moevement_core.cli.progress import OURS, Progress
from moevement_core.errors import ConfigError

POLL_S = 0.2
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


@dataclass(frozen=True)
class Launch:
    """What to start."""

    nproc: int
    argv: list[str]
    """The script and its arguments."""
    show_logs: bool
    """Whether ranks print to this process's output, or each to its files in the run directory."""
    fresh_interpreters: bool
    """Whether each rank is a new Python process, and not forked from one that has Megatron imported."""


def run_dir_of(argv: list[str]) -> Path | None:
    """The value of ``--run-dir`` in a script's arguments, configuration files included; the last one wins."""
    found = None
    words = config_file.expand(argv[1:])
    for index, word in enumerate(words):
        if word == "--run-dir" and index + 1 < len(words):
            found = words[index + 1]
        elif word.startswith("--run-dir="):
            found = word.split("=", 1)[1]
    return Path(found).absolute() if found else None


def train_iters_of(argv: list[str]) -> int | None:
    """The value of ``--train-iters``, for a progress bar; None where it is not a number or not given."""
    words = config_file.expand(argv[1:])
    values = [words[index + 1] for index, word in enumerate(words[:-1]) if word == "--train-iters"]
    return int(values[-1]) if values and values[-1].isdigit() else None


def launch_on_this_host(launch: Launch) -> int:
    """Run the ranks to their end and return the exit code: 0, 2 for what the user can mend, else 1.

    When one rank fails the others are ended: a training job cannot go on without it. Ctrl-C ends all.
    """
    script = Path(launch.argv[0])
    if not script.is_file():
        raise ConfigError(f"{script}: no such training script; give its path after the options of moevement launch")
    if launch.nproc < 1:
        raise ConfigError(f"--nproc {launch.nproc}: needs 1 or more")
    run_dir = run_dir_of(launch.argv)
    from torch.distributed.elastic.multiprocessing import SignalException, start_processes

    # It logs a traceback of its own internals for every rank that fails; the verdict below says what a user needs.
    for noisy in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    listener = socket.create_server(("127.0.0.1", 0), backlog=max(128, launch.nproc))
    environments = _environments(launch, listener.getsockname()[1])
    with tempfile.TemporaryDirectory(prefix="moevement-") as scratch, _nothing_left_behind():
        # A path of a Unix socket, which multiprocessing puts there, has 107 bytes and takes some thirty for itself.
        if len(scratch) < 72:
            for environment in environments.values():
                environment["TMPDIR"] = scratch
        logs = None if launch.show_logs or run_dir is None else run_dir / "logs"
        entry, arguments, method = _entry(launch)
        specs = _logs_specs(launch.nproc, Path(scratch), logs)
        with _temporary_files_in(scratch):
            ranks = start_processes(
                name="rank",
                entrypoint=entry,
                args=dict.fromkeys(range(launch.nproc), arguments),
                envs=environments,
                logs_specs=specs,
                start_method=method,
            )
        # After the ranks are forked, so that none of them inherits the store's thread.
        store = _store(listener)
        try:
            followed = (run_dir, train_iters_of(launch.argv), logs / "rank_0.out") if logs else (None, None)
            with Progress(*followed) as progress:
                result = ranks.wait(POLL_S)
                while result is None:
                    progress.update()
                    result = ranks.wait(POLL_S)
                progress.update()
        except (SignalException, KeyboardInterrupt) as interrupt:
            number = getattr(interrupt, "sigval", signal.SIGINT)
            name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            print(f"moevement: stopped by {name}", file=sys.stderr, flush=True)
            return 128 + int(number)
        finally:
            ranks.close(timeout=10)
            del store
        return _verdict(ranks, result, logs)


@contextmanager
def _nothing_left_behind() -> Iterator[None]:
    """End every process that descends from those started in a ``with`` block, however it was orphaned.

    A rank that is killed leaves its checkpoint writers and data workers to the nearest subreaper: this process.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    launcher = psutil.Process()
    before = set(launcher.children(recursive=True))
    try:
        yield
    finally:
        left = [process for process in launcher.children(recursive=True) if process not in before]
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=5)


@contextmanager
def _temporary_files_in(folder: str) -> Iterator[None]:
    """Torch keeps a file for the traceback of each forked rank and forgets it; make it where it is cleaned up."""
    before, tempfile.tempdir = tempfile.tempdir, folder
    try:
        yield
    finally:
        tempfile.tempdir = before


def _entry(launch: Launch) -> tuple[Any, tuple[Any, ...], str]:
    from megatron.moevement import platform, worker

    if launch.fresh_interpreters or not platform.is_cpu():
        return sys.executable, ("-m", worker.__name__, *launch.argv), "spawn"
    preload()
    return worker.run_forked_rank, (launch.argv,), "fork"


def preload() -> None:
    """Import everything that a rank without a GPU will need, so that ranks forked from here start at once."""
    from megatron.moevement import activate

    activate.activate()
    # torch's optimizers import it at their first step.
    import_module("torch._dynamo")


def _environments(launch: Launch, store_port: int) -> dict[int, dict[str, str]]:
    common = {
        "WORLD_SIZE": str(launch.nproc),
        "LOCAL_WORLD_SIZE": str(launch.nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": os.environ.get("MASTER_PORT", str(_free_port())),
        STORE_ENV: f"127.0.0.1:{store_port}",
        # All ranks are on this host, so gloo need not listen on any other interface.
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        # Each rank its share of the cores: more threads than cores make every collective wait for a straggler.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // launch.nproc))),
        **config_file.environment_of(launch.argv[1:]),
    }
    return {rank: {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(launch.nproc)}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _store(listener: socket.socket) -> Any:
    import torch

    port = listener.getsockname()[1]
    return torch.distributed.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=10),
        master_listen_fd=listener.detach(), use_libuv=True,
    )  # fmt: skip


def _logs_specs(nproc: int, errors: Path, logs: Path | None) -> Any:
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

    if logs is not None:
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--run-dir {logs.parent}: {error.strerror}; give a folder that can be made") from None

    class RankFiles(LogsSpecs):
        """``rank_N.out`` and ``rank_N.err`` for each rank, or nothing redirected."""

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            nothing = dict.fromkeys(range(nproc), "")

            def files(suffix: str) -> dict[int, str]:
                return {rank: str(logs / f"rank_{rank}.{suffix}") if logs else "" for rank in range(nproc)}

            return LogsDest(
                stdouts=files("out"), stderrs=files("err"), tee_stdouts=nothing, tee_stderrs=nothing,
                error_files={rank: str(errors / f"{rank}.json") for rank in range(nproc)},
            )  # fmt: skip

        @property
        def root_log_dir(self) -> str:
            return str(errors)

    return RankFiles()


def _verdict(ranks: Any, result: Any, logs: Path | None) -> int:
    if not result.is_failed():
        return 0
    codes = _exit_codes(ranks)
    if USAGE_ERROR in codes.values():
        if logs is not None:
            sys.stderr.write("".join(_lines_of_ours(logs)))
        return USAGE_ERROR
    # A rank that is killed makes its peers fail by their broken connections, not the other way round; and those that
    # went on were ended by SIGTERM just now.
    failed = {rank: code for rank, code in codes.items() if code not in (0, None, -signal.SIGTERM)}
    rank = min(failed or codes, key=lambda rank: (codes[rank] or 0) >= 0)
    code = codes[rank] or 0
    if logs is not None and code > 0:
        print(_tail(logs / f"rank_{rank}.err", 30), file=sys.stderr)
    how = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
    where = f"; its output is in {logs}/rank_{rank}.out and .err" if logs is not None else ""
    print(f"moevement: rank {rank} (pid {ranks.pids()[rank]}) {how}{where}", file=sys.stderr)
    return 1


def _exit_codes(ranks: Any) -> dict[int, int | None]:
    """Of all ranks; the result of torch's context names only the failure that it noticed first."""
    if hasattr(ranks, "subprocess_handlers"):
        return {rank: handler.proc.poll() for rank, handler in ranks.subprocess_handlers.items()}
    return {rank: process.exitcode for rank, process in enumerate(ranks._pc.processes)}


def _lines_of_ours(logs: Path) -> list[str]:
    lines = (logs / "rank_0.err").read_text(errors="replace").splitlines(keepends=True)
    return [line for line in lines if line.startswith(OURS)]


def _tail(path: Path, count: int) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-count:]) if path.exists() else ""


def slurm_environment() -> dict[str, str]:
    """Torch's variables for the task of Slurm that this process is.

    Raises:
        ConfigError: not inside a task that ``srun`` started.
    """
    from megatron.core import _slurm_utils as slurm

    rank, world_size, local_rank = (
        slurm.resolve_slurm_rank(), slurm.resolve_slurm_world_size(), slurm.resolve_slurm_local_rank(),
    )  # fmt: skip
    if rank is None or world_size is None or local_rank is None:
        raise ConfigError("no --nproc and not started by srun; say how many ranks this host runs with --nproc N")
    environment = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(local_rank)}
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if world_size > 1 and not os.environ.get(name):
            raise ConfigError(f"{name} is not set; the job script sets it for all tasks (examples/pretrain_moe/slurm)")
    return environment
