"""Launcher of a training script on one host: starts its ranks and spares, and runs the job to its end.

Without a GPU, ranks are forked from a process that has imported everything once. On two cores this saves most of the
start time. With a GPU, or on request, each rank is a fresh interpreter. The classes of
:mod:`moevement_core.launching.watch` decide what happens when a process ends.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from moevement_core.comms.token import Token, given_token
from moevement_core.errors import ConfigError, ProcessGroupError
from moevement_core.launching import config_file
from moevement_core.launching.children import Child, end_all, no_orphans_left
from moevement_core.launching.job_file import JobFile, stopped_by
from moevement_core.launching.limits import CONNECTIONS_TO_A_LAUNCHER, allow_open_files, check_process_limits
from moevement_core.launching.logs import LogFolder
from moevement_core.launching.signals import Signals, Stopped
from moevement_core.launching.store_process import StoreProcess
from moevement_core.launching.watch import ReplaceFailedRanks, UntilOneFails, Watch
from moevement_core.launching.worker import TrainerKind
from moevement_core.monitoring.endpoint import Endpoint, served_by
from moevement_core.rendezvous.config import HEALTH_CHECK, lease_seconds
from moevement_core.rendezvous.coordinator import LEASE_S
from moevement_core.rendezvous.job_code import KeptScript
from moevement_core.rendezvous.relay import LocalUpstream, Relay
from moevement_core.rendezvous.roster import STORE
from moevement_core.rendezvous.status_page import PAGE_ENV, StatusPage
from moevement_core.rendezvous.store import of_groups
from moevement_core.rendezvous.values import Values
from moevement_core.run.job_entry import JobEntry
from moevement_core.run.progress import Progress
from moevement_core.run.run_record import RunRecord
from moevement_core.speed.config import EVICT_SLOW
from moevement_core.storage.locations import refuse_exposed
from moevement_core.util.environment import MEMBER_ENV, NODE_ENV, STORE_ENV, SUPERVISOR_ENV
from moevement_core.util.exit_codes import REPLACES_ENV
from moevement_core.util.file_modes import FLAG, make_folder, use_file_mode
from moevement_core.util.words import counted

POLL_S = 0.02


@dataclass(frozen=True)
class Launch:
    """Description of the ranks and spares that a launcher starts on this machine."""

    nproc: int
    argv: list[str]
    """Path of the script, followed by its arguments."""
    trainer: TrainerKind
    """Kind of the script: one for Megatron, or one with its own trainer in plain torch."""
    show_logs: bool
    """True if ranks print to the launcher's output; False: each rank prints to its own files in the run directory."""
    fresh_interpreters: bool
    """True if each rank is a new Python process; False: ranks may be forks of a process with all imports done."""
    spares: int | None = None
    """Number of processes that are started besides ``nproc`` ranks, and wait to take over a rank.

    None: the first failure ends the job.
    """
    ranks_per_node: int | None = None
    """Number of consecutive processes that count as one simulated node; None: the whole host is one node."""
    spare_timeout_s: float = 600.0
    """Seconds that a job waits for a new spare when none is left."""
    respawn_after_s: float = 0.0
    """Seconds from the end of a process to the start of a new process in its place, usually as a spare.

    If the value is infinite, the launcher starts no new process.
    """
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that configuration files set for every process of the job."""
    command: str = ""
    """Command line of the launcher, as ``job.json`` records it."""


def read_once(argv: list[str]) -> tuple[list[str], dict[str, str]]:
    """Read the configuration files among a script's arguments, once for all processes of the job.

    Processes that start later do not read the files again, because a user may have edited them for another experiment.

    Returns:
        The script's path with its arguments, in which the files' flags replace ``--config``; and the variables that the
        files set.

    Raises:
        ConfigError: a URL of windows holds credentials.
    """
    words = config_file.expand(argv[1:])
    refuse_exposed(words)  # before the command line is recorded
    return [argv[0], *words], config_file.environment_of(argv[1:])


def run_dir_of(argv: list[str]) -> Path | None:
    """Return the value of ``--run-dir`` in a script's arguments as an absolute path; None without the flag."""
    value = value_of(argv, "--run-dir")
    return Path(value).absolute() if value else None


def value_of(argv: list[str], flag: str) -> str | None:
    """Return the last value of ``flag`` in a script's arguments and configuration files; None without the flag."""
    value = None
    words = config_file.expand(argv[1:])
    for index, word in enumerate(words):
        if word == flag and index + 1 < len(words):
            value = words[index + 1]
        elif word.startswith(f"{flag}="):
            value = word.split("=", 1)[1]
    return value


def refuse_eviction(argv: list[str], spares: int | None) -> None:
    """Refuse ``--moevement-evict-slow`` in a job that cannot drain a rank.

    Raises:
        ConfigError: the job has no spares, or no run directory for requests to drain.
    """
    if EVICT_SLOW not in config_file.expand(argv[1:]):
        return
    if not spares:
        raise ConfigError(f"{EVICT_SLOW} without --spares: no process could take over a slow rank; give --spares 1")
    if run_dir_of(argv) is None:
        raise ConfigError(f"{EVICT_SLOW} without --run-dir: the requests to drain are files there; give a folder")


def train_iters_of(argv: list[str]) -> int | None:
    """Return the value of ``--train-iters``, for a progress bar; None if the flag is missing or is not a number."""
    value = value_of(argv, "--train-iters")
    return int(value) if value and value.isdigit() else None


def lease_of(argv: list[str]) -> float:
    """Return the value of ``--moevement-lease-seconds`` in a script's arguments, or the default.

    Raises:
        ConfigError: the value is not a valid lease time.
    """
    value = value_of(argv, "--moevement-lease-seconds")
    return LEASE_S if value is None else lease_seconds(value)


def launch_on_this_host(launch: Launch) -> int:
    """Run the ranks of a job on this host to their end.

    With spares, a spare replaces a failed rank, and the survivors continue. Without spares, the launcher ends all ranks
    when one fails. Ctrl-C ends all processes.

    Returns:
        The exit code: 0 for success, 2 for an error that the user can correct, 128 plus the signal that stopped the
        job, else 1.
    """
    _check(launch)
    if value_of(launch.argv, HEALTH_CHECK) is not None:
        raise ConfigError(f"{HEALTH_CHECK}: this job has one host, and its ranks cannot move elsewhere; leave it out")
    refuse_eviction(launch.argv, launch.spares)
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
        no_orphans_left(),
        Signals() as signals,
        JobFile(record, JobEntry.of_this_process(launch.command, launch.nproc, launch.spares)) as job,
    ):
        logs = None if launch.show_logs or run_dir is None else _make_logs(run_dir)
        token = given_token() or Token.new()
        spares = f" and {counted(launch.spares, 'spare')}" if launch.spares else ""
        # Print this before the imports, which take seconds.
        print(f"moevement: starting {counted(launch.nproc, 'rank')}{spares}", flush=True)
        values = Values()
        values.set(STORE, f"127.0.0.1:{port}")
        relay = Relay(token, LocalUpstream(values))
        starter = _Starter(launch, port, relay.address, logs=logs, scratch=Path(scratch), token=token)
        signals.check()  # The starter has imported the trainer, and no signal is raised in an import.
        followed = (run_dir, train_iters_of(launch.argv), logs / "rank_0.out") if logs else (None, None)
        children: list[Child] = []
        watch: Watch
        server = StoreProcess(listener)
        try:
            pages: list[StatusPage] = []
            if launch.spares is None:
                pages = [StatusPage() for _ in range(launch.nproc)]
                children = [starter.start(number, {PAGE_ENV: page.path}) for number, page in enumerate(pages)]
            with Progress(*followed) as progress:
                if endpoint is not None:
                    progress.print_line(f"metrics of the run are served at {endpoint.url}")
                if launch.spares is None:
                    watch = UntilOneFails(children, record, progress.print_line, pages, pause=relay.poll)
                else:
                    watch = ReplaceFailedRanks(
                        start=starter.start, values=values, groups=of_groups(server.connect(), token),
                        ranks=launch.nproc, spares=launch.spares,
                        spare_timeout_s=launch.spare_timeout_s, lease_s=lease_of(launch.argv), record=record,
                        progress=progress, children=children, respawn_after_s=launch.respawn_after_s, pause=relay.poll,
                    )  # fmt: skip
                signals.may_wind_down = True
                folder = LogFolder(logs) if logs is not None else None
                refused = 0
                while watch.is_running():
                    signals.check()
                    if server.has_ended:
                        raise ProcessGroupError(
                            "the process that holds the job's store has ended; without the store, ranks cannot connect"
                        )
                    if folder is not None:
                        folder.look({child.label for child in children if child.code is None})
                    if signals.asked_by is not None:
                        _wind_down(watch, signals, progress)
                    if endpoint is not None:
                        endpoint.step(progress.print_line)
                    progress.update()
                    relay.poll(POLL_S)
                    if record is not None and relay.refused != refused:
                        refused = relay.refused
                        record.write_refused_connections(refused)
                progress.update()
        finally:
            end_all(children)
            starter.close()
            server.close()
            relay.close()
        job.outcome = watch.verdict()
        return job.outcome.code


def _wind_down(watch: Watch, signals: Signals, progress: Progress) -> None:
    number, signals.asked_by = signals.asked_by, None
    assert number is not None
    if not watch.wind_down():
        raise Stopped(number)
    name = signal.Signals(number).name
    progress.print_line(
        f"{name}: the job saves and ends at the next boundary between iterations; a second signal ends it at once"
    )


def _check(launch: Launch) -> None:
    """Refuse a launch that cannot work, before any process is started.

    Raises:
        ConfigError: the script is missing, an option is invalid, or a limit of this host is too low.
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
    members = launch.nproc + (launch.spares or 0)
    allow_open_files(launch.nproc, CONNECTIONS_TO_A_LAUNCHER * members)
    if not launch.respawn_after_s >= 0:
        raise ConfigError(f"--respawn-after {launch.respawn_after_s:g}: needs 0 seconds or more, or inf")
    if not launch.spare_timeout_s >= 0:
        raise ConfigError(f"--spare-timeout {launch.spare_timeout_s:g}: needs 0 seconds or more, or inf")
    switch = launch.trainer.switch
    if launch.spares is not None and switch and switch not in config_file.expand(launch.argv[1:]):
        raise ConfigError(
            f"--spares without {switch}: a spare could not restore the state of a failed rank; add that flag to the "
            "script's flags, or leave --spares out; for a script that binds its own trainer, give --trainer torch"
        )
    launch.trainer.refuse(launch.argv, launch.nproc)


class _Starter:
    """Starter of processes: holds what all ranks and spares of a job on this host have in common."""

    def __init__(
        self, launch: Launch, store_port: int, supervisor: str, *, logs: Path | None, scratch: Path, token: Token
    ) -> None:
        self._launch, self._logs, self._scratch = launch, logs, scratch
        with temporary_files_in(str(scratch)):  # Torch makes a folder for compiled code and never removes it.
            self._program = launch.trainer.program(launch.argv, fresh_interpreters=launch.fresh_interpreters)
        self._script = KeptScript(launch.argv[0])
        self._nodes: dict[int, str] = {}
        self._places: dict[int, int] = {}
        """Local rank of each process by its number."""
        self._common = {
            **_environment(launch, store_port),
            SUPERVISOR_ENV: supervisor,
            **token.environment,
            **self._script.environment,
        }

    def start(self, number: int, variables: Mapping[str, str] | None = None) -> Child:
        """Start the process of a member.

        Args:
            number: the member, unique in the job. Members below ``nproc`` start as ranks, all others as spares.
            variables: variables for this process's environment, in addition to those of all processes.
        """
        launch = self._launch
        label = f"rank_{number}" if number < launch.nproc else f"spare_{number - launch.nproc}"
        environment = {**self._common, **(variables or {}), "RANK": str(number)}
        environment["LOCAL_RANK"] = str(self._place_of(number, environment.get(REPLACES_ENV)))
        if launch.spares is not None:
            environment[MEMBER_ENV] = str(number)
        if launch.ranks_per_node is not None:
            environment[NODE_ENV] = self._node_of(number, (variables or {}).get(REPLACES_ENV), launch.ranks_per_node)
        # Multiprocessing puts Unix sockets into TMPDIR. A path of a socket has at most 107 bytes, and its name takes
        # about thirty of these.
        if len(str(self._scratch)) < 72:
            with suppress(OSError):
                self._scratch.mkdir(mode=0o700, exist_ok=True)  # A cleaner of temporary folders may have removed it.
                environment["TMPDIR"] = str(self._scratch)
        return Child(label, self._program, environment, self._logs)

    def _place_of(self, number: int, replaced: str | None) -> int:
        """Return the local rank of a process; a process started in place of an ended one has its local rank."""
        self._places[number] = number if replaced is None else self._places[int(replaced)]
        return self._places[number]

    def _node_of(self, number: int, replaced: str | None, ranks_per_node: int) -> str:
        """Return the simulated node of a process; a process started in place of an ended one is on the same node."""
        own = str(number // ranks_per_node)
        self._nodes[number] = own if replaced is None else self._nodes[int(replaced)]
        return self._nodes[number]

    def close(self) -> None:
        """Release the memory that holds the script's text; after this, no process can be started."""
        self._script.close()


@contextmanager
def temporary_files_in(folder: str) -> Iterator[None]:
    """Let this process make its temporary files in ``folder`` during a ``with`` block."""
    before, tempfile.tempdir = tempfile.tempdir, folder
    try:
        yield
    finally:
        tempfile.tempdir = before


def _environment(launch: Launch, store_port: int) -> dict[str, str]:
    """Return the environment variables that are the same for all ranks and spares."""
    return {
        "WORLD_SIZE": str(launch.nproc),
        "LOCAL_WORLD_SIZE": str(launch.nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": os.environ.get("MASTER_PORT", str(_free_port())),
        STORE_ENV: f"127.0.0.1:{store_port}",
        # All ranks are on this host, so gloo listens on the loopback interface alone.
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        # Each rank gets its share of the cores. With more threads than cores, every collective waits for a straggler.
        "OMP_NUM_THREADS": threads(launch.nproc),
        **gpu_environment(launch.trainer, has_spares=launch.spares is not None),
        **launch.variables,
    }


def threads(ranks: int) -> str:
    """Return OMP_NUM_THREADS for each of ``ranks`` processes that share this process's cores.

    Sums of floats depend on the number of threads, so this number must not depend on how a rank is started. Under
    Slurm, the processes share SLURM_CPUS_PER_TASK cores, even if Slurm does not bind the task to cores.
    """
    cores = min(len(os.sched_getaffinity(0)), int(os.environ.get("SLURM_CPUS_PER_TASK", sys.maxsize)))
    return os.environ.get("OMP_NUM_THREADS", str(max(1, cores // ranks)))


def gpu_environment(trainer: TrainerKind, *, has_spares: bool) -> dict[str, str]:
    """Return environment variables for ranks on GPUs; empty without a GPU.

    Variables that this process's environment already sets keep their values.

    Args:
        trainer: the kind of script.
        has_spares: True if survivors of a failure stay in their processes, and so abort their NCCL communicators.
    """
    if not trainer.uses_gpus():
        return {}
    needed = _ON_GPUS | (_WITH_ABORTS if has_spares else {})
    return {name: os.environ.get(name, value) for name, value in needed.items()}


_ON_GPUS = {
    # Megatron asks for CUDA_DEVICE_MAX_CONNECTIONS=1. That setting would also put all copies into one queue, and copies
    # that training waits for would queue behind copies of snapshots.
    "CUDA_DEVICE_MAX_COPY_CONNECTIONS": "8",
}
_WITH_ABORTS = {
    # An abort on the monitoring thread must not raise the CUDA error of an earlier kernel.
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # NCCL does not release the NVLink SHARP resources of an aborted communicator.
    "NCCL_NVLS_ENABLE": "0",
    # NCCL's diagnosis (RAS) thread reopens connections each time that an abort shuts them down.
    "NCCL_RAS_ENABLE": "0",
    # After a connection error, torch's watchdog of the group sleeps for four times this value (60 s in all by default),
    # so that all ranks can write their records. An abort waits for the watchdog, so neighbours of a lost rank would
    # leave late.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    # After such an error, torch's heartbeat thread writes a record of the last collectives, and then sleeps for 480 s.
    # The destructor of the process group waits for that thread, so survivors would hang in their next generation.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # By default, torch's watchdog ends the process after an error. Here the guard handles the error.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
}
"""Environment variables of ranks on GPUs if the job has spares, because survivors then abort their NCCL communicators.

The usage guide of nvidia-resiliency-ext's in-process restart recommends ``TORCH_NCCL_RETHROW_CUDA_ERRORS=0`` and
``NCCL_NVLS_ENABLE=0``.
"""


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _make_logs(run_dir: Path) -> Path:
    logs = run_dir / "logs"
    try:
        make_folder(run_dir)
        make_folder(logs)
    except OSError as error:
        raise ConfigError(f"--run-dir {run_dir}: {error.strerror}; give a folder that this process can make") from None
    return logs
