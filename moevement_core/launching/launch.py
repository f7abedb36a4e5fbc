"""Start the ranks of a training script: all of them on this host, or this one under Slurm.

Where no GPU is, ranks are forked from a process that has imported everything once, which on two cores saves most of the
start; with a GPU, or where asked for, each is a fresh interpreter. What happens when one of them ends is for
:mod:`moevement_core.launching.watch` to say.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from moevement_core.errors import ConfigError, ProcessGroupError
from moevement_core.exit_codes import REPLACES_ENV
from moevement_core.file_modes import FLAG, make_folder, use_file_mode
from moevement_core.job_entry import JobEntry
from moevement_core.launching import config_file
from moevement_core.launching.children import Child, end_all, nothing_left_behind
from moevement_core.launching.job_file import JobFile, stopped_by
from moevement_core.launching.limits import check_process_limits
from moevement_core.launching.logs import LogFolder
from moevement_core.launching.signals import Signals, Stopped
from moevement_core.launching.store_process import StoreProcess
from moevement_core.launching.watch import ReplaceWhoDies, UntilOneFails, Watch
from moevement_core.launching.worker import Trainer
from moevement_core.monitoring.endpoint import Endpoint, served_by
from moevement_core.progress import Progress
from moevement_core.rendezvous.config import lease_seconds
from moevement_core.rendezvous.coordinator import LEASE_S
from moevement_core.rendezvous.job_code import KeptScript
from moevement_core.rendezvous.signed_store import SignedStore
from moevement_core.rendezvous.status_page import PAGE_ENV, StatusPage
from moevement_core.rendezvous.token import Token, given_token
from moevement_core.restart.environment import MEMBER_ENV, NODE_ENV, STORE_ENV
from moevement_core.run_record import RunRecord
from moevement_core.words import counted

POLL_S = 0.02


@dataclass(frozen=True)
class Launch:
    """Description of the ranks and spares that a launcher starts on this machine."""

    nproc: int
    argv: list[str]
    """The script and its arguments."""
    trainer: Trainer
    """The kind of script."""
    show_logs: bool
    """Whether ranks print to this process's output, or each to its files in the run directory."""
    fresh_interpreters: bool
    """Whether each rank is a new Python process, and not forked from one that has imported all it needs."""
    spares: int | None = None
    """Processes beyond ``nproc`` that wait to take the place of a rank; None: the first failure ends the job."""
    ranks_per_node: int | None = None
    """So many processes in a row are taken for a node; None: all are on this host."""
    spare_timeout_s: float = 600.0
    """How long a job waits for a spare where none is left."""
    respawn_after_s: float = 0.0
    """How long after a process has died another one is started in its place; infinite: never."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """For the environment of every process, as configuration files set them."""
    command: str = ""
    """The command line that asked for it, for ``job.json``."""


def read_once(argv: list[str]) -> tuple[list[str], dict[str, str]]:
    """Read the configuration files among a script's arguments, once for all processes of the job.

    Processes that start later read none of them again: it may be one of another experiment by then.

    Returns:
        The script's path and its arguments with the files' flags in their place, and the variables that the files set.
    """
    return [argv[0], *config_file.expand(argv[1:])], config_file.environment_of(argv[1:])


def run_dir_of(argv: list[str]) -> Path | None:
    """The value of ``--run-dir`` in a script's arguments."""
    found = value_of(argv, "--run-dir")
    return Path(found).absolute() if found else None


def value_of(argv: list[str], flag: str) -> str | None:
    """The value of ``flag`` in a script's arguments, configuration files included; the last one wins."""
    found = None
    words = config_file.expand(argv[1:])
    for index, word in enumerate(words):
        if word == flag and index + 1 < len(words):
            found = words[index + 1]
        elif word.startswith(f"{flag}="):
            found = word.split("=", 1)[1]
    return found


def train_iters_of(argv: list[str]) -> int | None:
    """The value of ``--train-iters``, for a progress bar; None where it is not a number or not given."""
    value = value_of(argv, "--train-iters")
    return int(value) if value and value.isdigit() else None


def lease_of(argv: list[str]) -> float:
    """The value of ``--moevement-lease-seconds``, or its default.

    Raises:
        ConfigError: it is no lease.
    """
    value = value_of(argv, "--moevement-lease-seconds")
    return LEASE_S if value is None else lease_seconds(value)


def launch_on_this_host(launch: Launch) -> int:
    """Run the ranks to their end and return the exit code: 0, 2 for what the user can mend, else 1.

    With spares, a rank that dies is replaced and the others go on; without, all are ended when one fails, because a
    training job cannot go on without it. Ctrl-C ends all.
    """
    _check(launch)
    try:
        argv, variables = read_once(launch.argv)
        return _run(replace(launch, argv=argv, variables=variables))
    except Stopped as stopped:
        print(f"moevement: stopped by {stopped_by(stopped)}", file=sys.stderr, flush=True)
        return 128 + stopped.number


def _run(launch: Launch) -> int:
    run_dir = run_dir_of(launch.argv)
    use_file_mode(value_of(launch.argv, FLAG))
    record = RunRecord(run_dir) if run_dir is not None else None
    served = served_by(run_dir, lambda flag: value_of(launch.argv, flag))
    listener = socket.create_server(("127.0.0.1", 0), backlog=max(128, launch.nproc))
    port = int(listener.getsockname()[1])
    with (
        Endpoint(served) if served is not None else nullcontext() as endpoint,
        tempfile.TemporaryDirectory(prefix="moevement-", ignore_cleanup_errors=True) as scratch,
        nothing_left_behind(),
        Signals() as signals,
        JobFile(record, JobEntry.of_this_process(launch.command, launch.nproc, launch.spares)) as job,
    ):
        logs = None if launch.show_logs or run_dir is None else _make_logs(run_dir)
        token = given_token() or Token.new()
        spares = f" and {counted(launch.spares, 'spare')}" if launch.spares else ""
        print(f"moevement: starting {counted(launch.nproc, 'rank')}{spares}", flush=True)  # imports take seconds
        starter = _Starter(launch, port, logs, Path(scratch), token)
        signals.check()  # that has imported
        followed = (run_dir, train_iters_of(launch.argv), logs / "rank_0.out") if logs else (None, None)
        children: list[Child] = []
        watch: Watch
        server = StoreProcess(listener)
        try:
            pages: list[StatusPage] = []
            if launch.spares is None:
                pages = [StatusPage() for _ in range(launch.nproc)]
                children = [starter.start(number, {PAGE_ENV: page.path}) for number, page in enumerate(pages)]
            store = SignedStore(server.connect(), token)
            store.announce()
            with Progress(*followed) as progress:
                if endpoint is not None:
                    progress.say(f"figures of the run are served at {endpoint.url}")
                if launch.spares is None:
                    watch = UntilOneFails(children, record, progress.say, pages)
                else:
                    watch = ReplaceWhoDies(
                        starter.start, store, launch.nproc, launch.spares, launch.spare_timeout_s,
                        lease_of(launch.argv), record, progress, children, launch.respawn_after_s,
                    )  # fmt: skip
                signals.may_wind_down = True
                folder = LogFolder(logs) if logs is not None else None
                while watch.is_running():
                    signals.check()
                    if server.has_ended:
                        raise ProcessGroupError("the process that served the job's store has ended: nobody can meet")
                    if folder is not None:
                        folder.look({child.label for child in children if child.code is None})
                    if signals.asked_by is not None:
                        _wind_down(watch, signals, progress)
                    if endpoint is not None:
                        endpoint.step(progress.say)
                    progress.update()
                    time.sleep(POLL_S)
                progress.update()
        finally:
            end_all(children)
            starter.close()
            server.close()
        job.outcome = watch.verdict()
        return job.outcome.code


def _wind_down(watch: Watch, signals: Signals, progress: Progress) -> None:
    number, signals.asked_by = signals.asked_by, None
    assert number is not None
    if not watch.wind_down():
        raise Stopped(number)
    name = signal.Signals(number).name
    progress.say(f"{name}: the job ends at the next boundary between iterations, and saves; once more ends it at once")


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
    check_process_limits(launch.nproc + (launch.spares or 0))
    if not launch.respawn_after_s >= 0:
        raise ConfigError(f"--respawn-after {launch.respawn_after_s:g}: needs seconds, 0 or more, or inf")
    if not launch.spare_timeout_s >= 0:
        raise ConfigError(f"--spare-timeout {launch.spare_timeout_s:g}: needs seconds, 0 or more, or inf")
    switch = launch.trainer.switch
    if launch.spares is not None and switch and switch not in config_file.expand(launch.argv[1:]):
        raise ConfigError(
            f"--spares without {switch}: what a rank loses could not be brought back; add the flag to the script's, or "
            "leave --spares out; for a script that binds a trainer of its own give --trainer torch"
        )
    launch.trainer.refuse(launch.argv, launch.nproc)


class _Starter:
    """Starts processes."""

    def __init__(self, launch: Launch, store_port: int, logs: Path | None, scratch: Path, token: Token) -> None:
        self._launch, self._logs, self._scratch = launch, logs, scratch
        with temporary_files_in(str(scratch)):  # torch makes a folder for what it compiles, and leaves it
            self._program = launch.trainer.program(launch.argv, fresh_interpreters=launch.fresh_interpreters)
        self._script = KeptScript(launch.argv[0])
        self._nodes: dict[int, str] = {}
        self._common = {**_environment(launch, store_port), **token.environment, **self._script.environment}

    def start(self, number: int, variables: Mapping[str, str] | None = None) -> Child:
        """The first ones are the ranks, those after them spares.

        Args:
            number: of the process, which no other one has.
            variables: for its environment.
        """
        launch = self._launch
        label = f"rank_{number}" if number < launch.nproc else f"spare_{number - launch.nproc}"
        environment = {**self._common, **(variables or {}), "RANK": str(number), "LOCAL_RANK": str(number)}
        if launch.spares is not None:
            environment[MEMBER_ENV] = str(number)
        if launch.ranks_per_node is not None:
            environment[NODE_ENV] = self._node_of(number, (variables or {}).get(REPLACES_ENV), launch.ranks_per_node)
        # A path of a Unix socket, which multiprocessing puts there, has 107 bytes and takes some thirty for itself.
        if len(str(self._scratch)) < 72:
            with suppress(OSError):
                self._scratch.mkdir(mode=0o700, exist_ok=True)  # cleaners of temporary folders may have removed it
                environment["TMPDIR"] = str(self._scratch)
        return Child(label, self._program, environment, self._logs)

    def _node_of(self, number: int, replaced: str | None, ranks_per_node: int) -> str:
        """Return the node that a process is taken to be on: that of the one in whose place it is started."""
        own = str(number // ranks_per_node)
        self._nodes[number] = own if replaced is None else self._nodes[int(replaced)]
        return self._nodes[number]

    def close(self) -> None:
        """Give back what processes were started with; none is started any more."""
        self._script.close()


@contextmanager
def temporary_files_in(folder: str) -> Iterator[None]:
    """In a ``with`` block, this process's temporary files are in ``folder``."""
    before, tempfile.tempdir = tempfile.tempdir, folder
    try:
        yield
    finally:
        tempfile.tempdir = before


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
        "OMP_NUM_THREADS": threads(launch.nproc),
        **gpu_environment(launch.trainer, has_spares=launch.spares is not None),
        **launch.variables,
    }


def threads(ranks: int) -> str:
    """OMP_NUM_THREADS of each of ``ranks``; sums depend on it, so it is the same however they start.

    A task of Slurm has its share of a node's cores, also where Slurm does not bind it to them.
    """
    cores = min(len(os.sched_getaffinity(0)), int(os.environ.get("SLURM_CPUS_PER_TASK", sys.maxsize)))
    return os.environ.get("OMP_NUM_THREADS", str(max(1, cores // ranks)))


def gpu_environment(trainer: Trainer, *, has_spares: bool) -> dict[str, str]:
    """Return variables for ranks on GPUs; what this process's environment says itself is kept.

    Args:
        trainer: the kind of script.
        has_spares: whether ranks are entered again after a failure, and communicators aborted.
    """
    if not trainer.uses_gpus():
        return {}
    needed = _ON_GPUS | (_WITH_ABORTS if has_spares else {})
    return {name: os.environ.get(name, value) for name, value in needed.items()}


_ON_GPUS = {
    # Megatron asks for CUDA_DEVICE_MAX_CONNECTIONS=1, which would also put all copies into one queue: those that
    # training waits for behind those of snapshots.
    "CUDA_DEVICE_MAX_COPY_CONNECTIONS": "8",
}
_WITH_ABORTS = {
    # An abort on the monitoring thread must not raise in it what the failed kernel has left.
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # NVLink SHARP resources of an aborted communicator are not given back.
    "NCCL_NVLS_ENABLE": "0",
    # NCCL's thread for diagnosis makes its connections again as often as an abort shuts them down.
    "NCCL_RAS_ENABLE": "0",
}
"""The first two as the usage guide of nvidia-resiliency-ext's in-process restart says."""


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _make_logs(run_dir: Path) -> Path:
    logs = run_dir / "logs"
    try:
        make_folder(run_dir)
        make_folder(logs)
    except OSError as error:
        raise ConfigError(f"--run-dir {run_dir}: {error.strerror}; give a folder that can be made") from None
    return logs
