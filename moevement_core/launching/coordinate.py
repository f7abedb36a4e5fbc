"""Coordinator process of a job over several hosts (``moevement coordinate``): holds the values and assigns ranks.

The process runs on the host of the job script, and outlives every rank. If the user gives a command (``-- srun ...``),
the coordinator also starts the tasks of each node, which supervise the ranks there, and ends after these tasks.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from moevement_core.comms.token import HOW, Token, given_token
from moevement_core.errors import ConfigError
from moevement_core.launching.job_file import JobFile, JobOutcome, coordinator_of, entry_of, stopped_by
from moevement_core.launching.limits import CONNECTIONS_TO_A_STORE, allow_open_files
from moevement_core.launching.node_tasks import NodeCommand, NodeTasks
from moevement_core.launching.signals import Signals, Stopped
from moevement_core.monitoring.endpoint import SERVED, Endpoint, Served
from moevement_core.rendezvous.coordinator import LEASE_S, Coordinator, State
from moevement_core.rendezvous.coordinator_loop import LEASES_ALONE, POLL_S, CoordinatorLoop, Turn
from moevement_core.rendezvous.lease_client import LEASES_WITHOUT
from moevement_core.rendezvous.office import Term
from moevement_core.rendezvous.process_list import process_entries
from moevement_core.rendezvous.roster import RANKS, STORE
from moevement_core.rendezvous.status_page import boot_time_s
from moevement_core.rendezvous.store import of_groups
from moevement_core.rendezvous.values import Values
from moevement_core.run.drain_requests import DrainRequests, DrainWatch
from moevement_core.run.job_entry import JobEntry
from moevement_core.run.run_record import RunRecord
from moevement_core.util.environment import STORE_ENV
from moevement_core.util.exit_codes import USAGE_ERROR
from moevement_core.util.file_modes import file_mode, make_folder
from moevement_core.util.words import spares_words

OPTIONS = "coordinator/options"
"""Key of the options of the coordinator (:class:`Coordination`) that another coordinator of the job needs."""
LOOK_S = 5.0
"""Seconds between two looks into ``job.json`` for the newest coordinator."""
ENTRIES_S = 2.0
"""Longest time in seconds until ``ranks.json`` lists spares whose supervisor has lost or regained its connection.

All other changes are written at once.
"""
MOST_PORT = 65535
GRACE_S = 60.0
"""Longest time in seconds for which the coordinator waits at the end of the job until all tasks have ended.

The coordinator answers in this time, because tasks still ask it.
"""

MOST_REASONS = 3
"""Number of errors of survivors that the coordinator prints for one failure."""
TASKS_GRACE_S = 20.0
"""Longest time in seconds for which the coordinator waits until the commands that started tasks (``srun``) have ended.

The wait begins when no task is connected any more. After it, the coordinator kills the commands.
"""


@dataclass(frozen=True)
class Coordination:
    """Options of ``moevement coordinate``."""

    ranks: int
    """Number of ranks of the job, without spares."""
    host: str
    """Address of this host at which the coordinator and the store of process groups listen."""
    port: int
    """Port of the coordinator; 0 for any free port."""
    spare_timeout_s: float
    """Seconds that the job waits for a spare when none is left."""
    run_dir: Path | None = None
    """Folder for ``ranks.json``, ``refused_connections.json`` and ``job.json``; None: no files are written."""
    tasks: NodeCommand | None = None
    """Command that starts the tasks of each node; None if the job script starts them."""
    command: str = ""
    """Command line of the coordinator, as ``job.json`` records it."""
    has_standby: bool = True
    """True if a supervisor starts a standby, which takes over when this coordinator is lost."""

    def encode(self) -> str:
        """Return the options that another coordinator of the job needs, as text."""
        options = {**asdict(replace(self, tasks=None)), "run_dir": str(self.run_dir) if self.run_dir else None}
        return json.dumps(options)

    @staticmethod
    def decode(text: str, host: str) -> Coordination:
        """Return the options of a coordinator on ``host`` that continues the job of another one."""
        options = json.loads(text)
        run_dir = Path(options["run_dir"]) if options["run_dir"] else None
        return Coordination(**{**options, "host": host, "run_dir": run_dir})


def coordinate(what: Coordination) -> int:
    """Run the coordinator of a job until the job has ended, and return the exit code for this process.

    Raises:
        ConfigError: an option is invalid, the run directory cannot be made, or the address and port cannot be used.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if what.ranks < 1:
        raise ConfigError(f"--ranks {what.ranks}: needs 1 or more")
    if not what.host.strip():  # An empty host would listen at every address.
        raise ConfigError(f"--host {what.host!r}: is empty; give the address of this host that the nodes reach")
    if not 0 <= what.port <= MOST_PORT:
        raise ConfigError(f"--port {what.port}: needs 0 to {MOST_PORT}")
    allow_open_files(0, CONNECTIONS_TO_A_STORE * what.ranks)
    file_mode()  # Raises ConfigError if the file mode in the environment is invalid.
    if not what.spare_timeout_s >= 0:
        raise ConfigError(f"--spare-timeout {what.spare_timeout_s:g}: needs 0 seconds or more, or inf")
    if what.run_dir is not None:
        _make(what.run_dir)
    record = RunRecord(what.run_dir) if what.run_dir is not None else None
    # The run directory may belong to another job, which only ranks check. So the entry is written when they train.
    entry = JobFile(record, JobEntry.of_this_process(what.command, what.ranks, None), begins=False)
    with Signals() as signals:
        signals.may_wind_down = True
        try:
            with entry:
                listener = _listen(what, what.port)
                at = f"{what.host}:{listener.getsockname()[1]}"
                entry.listens_at(at)
                outcome = run_coordinator(what, signals, entry, CoordinatorPlace(listener, Values(), Term(1, at)))
                if not isinstance(outcome, JobOutcome):
                    return outcome  # The other coordinator has written job.json.
                entry.outcome = outcome
                return outcome.code
        except Stopped as stopped:
            print(f"moevement: stopped by {stopped_by(stopped)}", file=sys.stderr, flush=True)
            return 128 + stopped.number


@dataclass(frozen=True)
class CoordinatorPlace:
    """Place of a coordinator: where supervisors find it, its values, and since when it is in office."""

    listener: socket.socket
    values: Values
    term: Term
    lease_s: float = LEASE_S
    """Lease time in seconds, until a supervisor knows it from the flags of the script."""
    expected: frozenset[str] = frozenset()
    """Names of the supervisors that obeyed the coordinator before this one."""
    is_awaited: bool = True
    """True if a job script waits for this process and its exit code; False for a standby that has taken over."""


def _code_of(record: RunRecord | None) -> int:
    """Return the exit code of a job that another coordinator has ended, from ``job.json``; 1 if it is not known."""
    job = entry_of(record)
    return 1 if job is None or job.code is None else job.code


def run_coordinator(
    options: Coordination, signals: Signals, entry: JobFile, place: CoordinatorPlace
) -> JobOutcome | int:
    """Run a coordinator until the job has ended.

    Returns:
        The outcome of the job; only its exit code if another coordinator has taken over and ended it.
    """
    running: _Coordination | None = None
    try:
        running = _Coordination(options, signals, entry, place)
        return running.run(signals)
    finally:
        if running is not None:
            running.end_tasks()


class _Coordination:
    def __init__(self, options: Coordination, signals: Signals, entry: JobFile, place: CoordinatorPlace) -> None:
        import torch

        signals.check()  # The import took seconds, and no signal is raised within it.
        self._what, self._entry, self._is_awaited = options, entry, place.is_awaited
        self._record = RunRecord(options.run_dir) if options.run_dir is not None else None
        of_store = _listen(options, 0)
        token, store = _token_for(options), (options.host, int(of_store.getsockname()[1]))
        self._store = torch.distributed.TCPStore(
            *store, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=10),
            master_listen_fd=of_store.detach(), use_libuv=True,
        )  # fmt: skip
        values = self._values = place.values
        values.set(RANKS, str(options.ranks))
        values.set(STORE, f"{store[0]}:{store[1]}")
        values.set(OPTIONS, options.encode())
        self._drains = DrainWatch(DrainRequests(options.run_dir)) if options.run_dir is not None else None
        self._coordinator = Coordinator(
            values, options.ranks, options.spare_timeout_s, report, groups=of_groups(self._store, token),
            lease_s=place.lease_s,
        )  # fmt: skip
        if self._drains is not None:  # A standby must not give ranks to a drained node.
            self._drains.watch(place.lease_s / 4)
            self._coordinator.drains.request(self._drains.standing)
        self._loop = CoordinatorLoop(
            self._coordinator, place.listener, values=values, term=place.term, token=token,
            on_wind_down=_report_wind_down, may_have_standby=options.has_standby, expected=place.expected,
        )  # fmt: skip
        self._server = self._loop.server
        self._standby = ""
        """Address of the standby of which the user knows; empty for none."""
        self._endpoint: Endpoint | None = None
        self._has_endpoint = False
        """True once the metrics endpoint was opened, or could not be opened."""
        if (served := values.read(SERVED)) is not None:
            try:
                self._open_endpoint(served)
            except ConfigError as error:  # Another job may use the port of this host; this job goes on.
                report(f"metrics of the run are not served any more: {error}")
        self._generation = self._loop.generation
        """Newest generation of which the user knows."""
        self._reported, self._written = 0, list[dict[str, Any]]()
        self._population: tuple[Any, ...] = ()
        self._looked_at = -float("inf")
        """Time at which the entries of ``ranks.json`` were last computed, in monotonic seconds."""
        self._refused = 0
        at = place.term.owner
        report(f"{STORE_ENV}={at} is the coordinator of a job of {options.ranks} ranks")
        self._tasks = (
            NodeTasks(options.tasks, {STORE_ENV: at, **token.environment}, report)
            if options.tasks is not None
            else None
        )

    def run(self, signals: Signals) -> JobOutcome | int:
        """Run the coordinator until the job has ended.

        Returns:
            The job's exit code and the reason; only the exit code if another coordinator has taken over.
        """
        try:
            return self._run(signals)
        except Stopped as stopped:
            self._end_at_once(stopped)
            raise

    def _run(self, signals: Signals) -> JobOutcome | int:
        while not self._loop.is_settled:
            turn = self._loop.turn(POLL_S)
            signals.check()
            if turn is Turn.REPLACED:
                return self._follow(signals) if self._is_awaited else self._leave()
            if turn is Turn.DECIDED:
                self._report_changes()
                if self._drains is not None:
                    self._drains.is_done(self._coordinator.drains.request(self._drains.standing))
                self._look_after_signals(signals)
                self._look_after_tasks()
                self._look_after_endpoint()
        self._loop.end(max(GRACE_S, (LEASES_WITHOUT + 1) * self._coordinator.membership.lease_s))
        if self._tasks is not None:
            # srun waits for the tasks of a lost node until Slurm notices the loss, which may take minutes.
            self._tasks.wait_and_kill(TASKS_GRACE_S)
        reason, code = self._coordinator.end
        if self._coordinator.state is State.STOPPED:
            print(f"moevement: the job is stopped: {reason}", file=sys.stderr, flush=True)
        return JobOutcome(code, reason)

    def _look_after_signals(self, signals: Signals) -> None:
        """Let the job end at the next boundary if a signal asks for it; at once if no rank trains."""
        if signals.asked_by is None:
            return
        if self._generation < 0:
            raise Stopped(signals.asked_by)  # No rank would reach a boundary.
        self._loop.wind_down(signal.Signals(signals.asked_by).name)
        signals.asked_by = None

    def _report_standby(self) -> None:
        standby = self._server.mirror.ready
        if standby != self._standby:
            report(f"{standby} stands by for the coordinator" if standby else f"the standby {self._standby} is lost")
            self._standby = standby
            self._entry.has_standby(standby)

    def _leave(self) -> int:
        """End this process, which was a standby, because its supervisor has no other one while it is there.

        Returns:
            The exit code of a process that has nothing to say about the job.
        """
        report("another coordinator has taken over the job; this one ends")
        self._entry.hands_over()
        self._loop.follow().close()
        return 0

    def _follow(self, signals: Signals) -> int:
        """Wait until the job ends that another coordinator has taken over; pass on requests to end it.

        Returns:
            The job's exit code; 1 if the job has lost all its coordinators.
        """
        report("another coordinator has taken over the job; this one only waits for the end of the job")
        self._entry.hands_over()
        client, lease_s, heard_at = self._loop.follow(), self._coordinator.membership.lease_s, time.monotonic()
        looked_at = heard_at
        while client.stop is None and time.monotonic() - heard_at < LEASES_ALONE * lease_s:
            client.step((), {})
            signals.check()
            if signals.asked_by is not None:
                client.request("wind_down", signal.Signals(signals.asked_by).name)
                signals.asked_by = None
            if boot_time_s() < client.held_until:
                heard_at = time.monotonic()
            elif time.monotonic() - looked_at > LOOK_S:
                looked_at = time.monotonic()
                client.look_for(coordinator_of(self._record))
            if self._tasks is not None and not self._tasks.are_running:
                break
            time.sleep(POLL_S)
        client.close()
        if self._tasks is not None:
            self._tasks.wait_and_kill(TASKS_GRACE_S)
        return int(client.stop["code"]) if client.stop is not None else _code_of(self._record)

    def _end_at_once(self, stopped: Stopped) -> None:
        """Stop the job, because a signal ends this process; otherwise the standby would take over."""
        if self._loop.is_over or not self._loop.office.standby or not self._server.is_in_office:
            return
        self._coordinator.stop(f"stopped by {stopped_by(stopped)}", 128 + stopped.number)
        self._loop.end(self._coordinator.membership.lease_s / 2)

    def _look_after_tasks(self) -> None:
        """Start the tasks of a node again if they have ended.

        If no task of any node is left, or if the tasks of a node end repeatedly before the job begins, stop the job.
        """
        if self._tasks is None or self._loop.is_over:
            return
        self._tasks.step(self._server.connected, self._server.heard, has_begun=self._generation >= 0)
        if not self._tasks.are_running and not self._server.supervisors:
            self._coordinator.stop(f"{self._tasks.how_they_ended} before the job did; their output says why")
        elif self._tasks.failed is not None:
            self._coordinator.stop(f"{self._tasks.failed}; their output says why")

    def _look_after_endpoint(self) -> None:
        """Serve the metrics endpoint if the script's flags ask for it; stop the job if the port cannot be bound.

        Only tasks see the script's flags, so they pass the endpoint's flags on as a value of the job. The coordinator
        opens the endpoint only before the first generation. So a port that cannot be bound never stops a job that
        trains.
        """
        if not self._has_endpoint and self._generation < 0 and (served := self._values.read(SERVED)):
            try:
                self._open_endpoint(served)
            except ConfigError as error:
                self._coordinator.stop(str(error), USAGE_ERROR)
                return
        if self._endpoint is not None:
            self._endpoint.step(report)

    def _open_endpoint(self, served: str) -> None:
        self._has_endpoint = True
        self._endpoint = Endpoint(Served.decode(served))
        report(f"metrics of the run are served at {self._endpoint.url}")

    def _report_changes(self) -> None:
        coordinator = self._coordinator
        for death in coordinator.losses.all[self._reported :]:
            subject = f"rank {death.rank}" if death.rank is not None else "a spare"
            report(f"{subject} (pid {death.pid}) {death.how}")
        self._reported = len(coordinator.losses.all)
        roster = coordinator.roster
        if self._loop.generation != self._generation:
            self._generation = self._loop.generation
            for reason in roster.reasons[:MOST_REASONS]:
                report(reason)
            report(f"generation {roster.generation} is formed; spares: {spares_words(roster.spares, roster.starting)}")
        self._report_standby()
        if coordinator.has_trained():
            self._entry.begin()
        run_dir = self._what.run_dir
        if run_dir is not None and self._generation >= 0 and self._may_have_changed():
            self._write_ranks(run_dir)
        if run_dir is not None and self._server.refused != self._refused:
            self._refused = self._server.refused
            RunRecord(run_dir).write_refused_connections(self._refused)

    def _may_have_changed(self) -> bool:
        """Return True if ``ranks.json`` may need other entries; to compute them takes time linear in the ranks."""
        coordinator, now = self._coordinator, time.monotonic()
        population = (
            coordinator.roster.generation, len(coordinator.membership.alive), len(coordinator.membership.dead),
            coordinator.respawns.starting(),
        )  # fmt: skip
        if population == self._population and now - self._looked_at < ENTRIES_S:
            return False
        self._population, self._looked_at = population, now
        return True

    def _write_ranks(self, run_dir: Path) -> None:
        coordinator = self._coordinator
        processes = process_entries(coordinator.roster, coordinator.membership, coordinator.respawns)
        if processes != self._written:
            self._written = processes
            with suppress(OSError):  # The record reports the same error.
                make_folder(run_dir)
            RunRecord(run_dir).write_ranks(processes)

    def end_tasks(self) -> None:
        """End the commands that started tasks, if they still run, and close the metrics endpoint."""
        if self._tasks is not None:
            self._tasks.end(GRACE_S)
        if self._endpoint is not None:
            self._endpoint.close()


def _token_for(options: Coordination) -> Token:
    """Return the job token from the environment, or a new token if this process starts all tasks itself.

    Raises:
        ConfigError: the environment has no token, and another program starts the tasks. That program would not know a
            new token.
    """
    if (token := given_token()) is not None:
        return token
    if options.tasks is None:
        raise ConfigError(
            f"no job token is set, and the coordinator cannot give one to tasks that another program starts; {HOW}"
        )
    return Token.new()


def _make(run_dir: Path) -> None:
    try:
        make_folder(run_dir)
    except OSError as error:
        raise ConfigError(f"--run-dir {run_dir}: {error.strerror}; give a folder that this process can make") from None


def _listen(options: Coordination, port: int) -> socket.socket:
    try:
        return socket.create_server((options.host, port), backlog=max(128, 2 * options.ranks))
    except OSError as error:
        raise ConfigError(
            f"--host {options.host} --port {port}: {error.strerror}; give an address of this host and a free port"
        ) from None


def _report_wind_down(why: str) -> None:
    report(f"{why}: the job saves and ends at the next boundary between iterations; a second signal ends it at once")


def report(text: str) -> None:
    """Print a line for the user."""
    print(f"moevement: {text}", flush=True)
