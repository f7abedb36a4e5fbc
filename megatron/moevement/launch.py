"""Start the ranks of a training script: all of them on this host, or this one under Slurm.

Where no GPU is, ranks are forked from a process that has imported Megatron once, which on two cores saves most of the
start; with a GPU, or where asked for, each is a fresh interpreter. What happens when one of them ends is for
:mod:`megatron.moevement.watch` to say.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil

from megatron.moevement import config_file
from megatron.moevement.children import ASKING, Child, Program, end_all
from megatron.moevement.restart.environment import MEMBER_ENV, NODE_ENV, STORE_ENV
from megatron.moevement.watch import ReplaceWhoDies, UntilOneFails, Watch
from moevement_core.cli.progress import Progress
from moevement_core.errors import ConfigError
from moevement_core.run_record import RunRecord

POLL_S = 0.02
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
    spares: int | None = None
    """Processes beyond ``nproc`` that wait to take the place of a rank; None: the first failure ends the job."""
    ranks_per_node: int | None = None
    """So many processes in a row are taken for a node; None: all are on this host."""
    spare_timeout_s: float = 600.0
    """How long a job waits for a spare where none is left."""


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

    With spares, a rank that dies is replaced and the others go on; without, all are ended when one fails, because a
    training job cannot go on without it. Ctrl-C ends all.
    """
    _check(launch)
    if launch.spares is not None:  # torch reads it once; every look into the store that finds nothing yet is told of
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    run_dir = run_dir_of(launch.argv)
    listener = socket.create_server(("127.0.0.1", 0), backlog=max(128, launch.nproc))
    port = int(listener.getsockname()[1])
    with tempfile.TemporaryDirectory(prefix="moevement-") as scratch, _nothing_left_behind(), _signals_raised():
        logs = None if launch.show_logs or run_dir is None else _make_logs(run_dir)
        starter = _Starter(launch, port, logs, Path(scratch))
        children = [starter.start() for _ in range(launch.nproc + (launch.spares or 0))]
        # After the ranks are forked, so that none of them inherits the store's thread.
        store = _store(listener)
        followed = (run_dir, train_iters_of(launch.argv), logs / "rank_0.out") if logs else (None, None)
        watch: Watch
        try:
            with Progress(*followed) as progress:
                if launch.spares is None:
                    watch = UntilOneFails(children)
                else:
                    record = RunRecord(run_dir) if run_dir is not None else None
                    watch = ReplaceWhoDies(
                        children, starter.start, store, ("127.0.0.1", port), launch.nproc, launch.spare_timeout_s,
                        record, progress,
                    )  # fmt: skip
                while watch.is_running():
                    progress.update()
                    time.sleep(POLL_S)
                progress.update()
        except _Stopped as stopped:
            name = "Ctrl-C" if stopped.number == signal.SIGINT else signal.Signals(stopped.number).name
            print(f"moevement: stopped by {name}", file=sys.stderr, flush=True)
            return 128 + stopped.number
        finally:
            end_all(children)
            del store
        return watch.verdict()


class _Stopped(BaseException):
    """Somebody wants the job to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def _signals_raised() -> Iterator[None]:
    """Signals that ask to end are raised as exceptions, here and not in processes forked from here."""

    def stop(number: int, frame: Any) -> None:
        for one in ASKING:  # once is enough: what comes now is the end
            signal.signal(one, signal.SIG_IGN)
        raise _Stopped(number)

    before = {number: signal.signal(number, stop) for number in ASKING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _check(launch: Launch) -> None:
    """What can be said before anything is started.

    Raises:
        ConfigError: it cannot be launched.
    """
    script = Path(launch.argv[0])
    if not script.is_file():
        raise ConfigError(f"{script}: no such training script; give its path after the options of moevement launch")
    for flag, value, least in (
        ("--nproc", launch.nproc, 1),
        ("--spares", launch.spares, 0),
        ("--ranks-per-node", launch.ranks_per_node, 1),
    ):
        if value is not None and value < least:
            raise ConfigError(f"{flag} {value}: needs {least} or more")
    if launch.spares is not None and "--moevement-sparse-ckpt" not in config_file.expand(launch.argv[1:]):
        raise ConfigError(
            "--spares without --moevement-sparse-ckpt: what a rank loses could not be brought back; add the flag to "
            "the script's, or leave --spares out"
        )


class _Starter:
    """Starts processes, one after the other, each with a number of its own."""

    def __init__(self, launch: Launch, store_port: int, logs: Path | None, scratch: Path) -> None:
        self._launch, self._logs, self._scratch = launch, logs, scratch
        with _temporary_files_in(str(scratch)):  # torch makes a folder for what it compiles, and leaves it
            self._program = _program(launch)
        self._common = _environment(launch, store_port)
        self._started = 0

    def start(self) -> Child:
        """The first ones are the ranks, those after them spares."""
        launch, number = self._launch, self._started
        self._started += 1
        label = f"rank_{number}" if number < launch.nproc else f"spare_{number - launch.nproc}"
        environment = {**self._common, "RANK": str(number), "LOCAL_RANK": str(number)}
        if launch.spares is not None:
            environment[MEMBER_ENV] = str(number)
        if launch.ranks_per_node is not None:
            environment[NODE_ENV] = str(number // launch.ranks_per_node)
        # A path of a Unix socket, which multiprocessing puts there, has 107 bytes and takes some thirty for itself.
        if len(str(self._scratch)) < 72:
            environment["TMPDIR"] = str(self._scratch)
        return Child(label, self._program, environment, self._logs)


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
    before, tempfile.tempdir = tempfile.tempdir, folder
    try:
        yield
    finally:
        tempfile.tempdir = before


def _program(launch: Launch) -> Program:
    from megatron.moevement import platform, worker

    if launch.fresh_interpreters or not platform.is_cpu():
        return Program(command=[sys.executable, "-m", worker.__name__, *launch.argv])
    preload()
    return Program(worker.run_forked_rank, (launch.argv,))


def preload() -> None:
    """Import everything that a rank without a GPU will need, so that ranks forked from here start at once."""
    from megatron.moevement import activate

    activate.activate()
    # torch's optimizers import the one at their first step, Megatron the other when it makes a tokenizer.
    for late in ("torch._dynamo", "megatron.core.tokenizers.text.libraries"):
        import_module(late)


def _environment(launch: Launch, store_port: int) -> dict[str, str]:
    """What all processes have in common."""
    return {
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


def _make_logs(run_dir: Path) -> Path:
    logs = run_dir / "logs"
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--run-dir {run_dir}: {error.strerror}; give a folder that can be made") from None
    return logs


def slurm_environment(*, meets_at_master: bool) -> dict[str, str]:
    """Torch's variables for the task of Slurm that this process is.

    Args:
        meets_at_master: whether ranks meet at MASTER_ADDR and MASTER_PORT, and not in a store that is named.

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
        if meets_at_master and world_size > 1 and not os.environ.get(name):
            raise ConfigError(f"{name} is not set; the job script sets it for all tasks (examples/pretrain_moe/slurm)")
    return environment
