"""A job over several hosts: one process decides (``moevement coordinate``), each task watches one rank or spare.

Slurm does not start a task again. So a task is not the rank itself but watches it, says when it has died, and starts
another process in its place, which joins as a spare.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from megatron.moevement import config_file
from megatron.moevement.children import Child, Program, end_all
from megatron.moevement.restart.environment import MEMBER_ENV, STORE_ENV
from moevement_core.cli.exit_codes import USAGE_ERROR
from moevement_core.errors import ConfigError
from moevement_core.rendezvous.coordinator import Coordinator, State
from moevement_core.rendezvous.roster import DEATH, DEATHS, STOP
from moevement_core.run_record import RunRecord

POLL_S = 0.05
LOOK_S = 0.5
"""How often a task asks whether the job has ended."""
GRACE_S = 5.0
"""How long processes have to end by themselves then, and the store is there for them."""


def coordinate(ranks: int, host: str, port: int, spare_timeout_s: float, run_dir: Path | None) -> int:
    """Hold the store and give out ranks until the job has ended; returns the exit code.

    Args:
        ranks: of the job, without spares.
        host: address to listen at.
        port: likewise; 0 for any that is free.
        spare_timeout_s: how long to wait for a spare where none is left.
        run_dir: where ``ranks.json`` is kept; nothing keeps it nowhere.

    Raises:
        ConfigError: nothing can listen there.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import torch

    from megatron.moevement.restart.store import InProcessWrapper

    if ranks < 1:
        raise ConfigError(f"--ranks {ranks}: needs 1 or more")
    try:
        listener = socket.create_server((host, port), backlog=max(128, 2 * ranks))
    except OSError as error:
        raise ConfigError(f"--host {host} --port {port}: {error.strerror}; give an address of this host") from None
    address = (host, int(listener.getsockname()[1]))
    store = torch.distributed.TCPStore(
        *address, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=10),
        master_listen_fd=listener.detach(), use_libuv=True,
    )  # fmt: skip

    def say(text: str) -> None:
        print(f"moevement: {text}", flush=True)

    say(f"{STORE_ENV}={address[0]}:{address[1]} is the store of a job of {ranks} ranks")
    coordinator = Coordinator(store, ranks, spare_timeout_s, say, InProcessWrapper(store, address, ranks))
    generation, told = -1, list[dict[str, Any]]()
    while coordinator.state not in (State.DONE, State.STOPPED):
        coordinator.step()
        if coordinator.roster.generation != generation:
            generation = coordinator.roster.generation
            for death in coordinator.roster.deaths:
                say(f"rank {death.rank} (pid {death.pid}) {death.how}")
            say(f"generation {generation} is formed; {coordinator.roster.spares} spares are left")
        if run_dir is not None and generation >= 0 and (who := coordinator.who()) != told:
            told = who
            run_dir.mkdir(parents=True, exist_ok=True)
            RunRecord(run_dir).write_ranks(who)
        time.sleep(POLL_S)
    if coordinator.state is State.STOPPED:
        print(f"moevement: the job is stopped: {store.get(STOP).decode()}", file=sys.stderr, flush=True)
    time.sleep(GRACE_S + 2 * LOOK_S)
    return 0 if coordinator.state is State.DONE else 1


@dataclass(frozen=True)
class Task:
    """Which of the tasks that were started together this is."""

    number: int
    tasks: int

    def member(self, attempt: int) -> int:
        """A number for the how many-th process of this task, that no other one has."""
        return self.number + attempt * self.tasks


def watch_one(argv: list[str], task: Task, spares: int, environment: dict[str, str]) -> int:
    """Run one rank or spare, and another when it dies, until the job has ended; returns the exit code.

    Args:
        argv: the script and its arguments.
        task: this one.
        spares: of all tasks, how many are beyond the job's ranks.
        environment: torch's variables.

    Raises:
        ConfigError: there is no coordinator.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from megatron.moevement import worker
    from megatron.moevement.restart.store import connect, store_address

    if (address := store_address()) is None:
        raise ConfigError(
            f"--spares under srun needs {STORE_ENV}=HOST:PORT of a moevement coordinate (examples/pretrain_moe/slurm)"
        )
    if not 0 <= spares < task.tasks:
        raise ConfigError(f"--spares {spares} of {task.tasks} tasks: needs 0 to {task.tasks - 1}")
    store, attempt = connect(address), 0
    common = {**environment, "WORLD_SIZE": str(task.tasks - spares), **config_file.environment_of(argv[1:])}
    while True:
        member = task.member(attempt)
        own = {**common, "RANK": str(member), MEMBER_ENV: str(member)}
        child = Child(f"member_{member}", Program(command=[sys.executable, "-m", worker.__name__, *argv]), own, None)
        try:
            while child.poll() is None and not store.check([STOP]):
                time.sleep(LOOK_S)
            deadline = time.monotonic() + GRACE_S
            while child.poll() is None and time.monotonic() < deadline:
                time.sleep(POLL_S)
        finally:
            end_all([child])
        if store.check([STOP]):
            return 0 if not store.get(STOP) else 1
        if child.code == 0:
            return 0
        if child.code == USAGE_ERROR:
            store.set(STOP, f"member {member} found a mistake in the flags")
            return USAGE_ERROR
        _tell_death(store, member, child)
        attempt += 1


def _tell_death(store: Any, member: int, child: Child) -> None:
    print(f"moevement: member {member} (pid {child.pid}) {child.how}; starting another", file=sys.stderr, flush=True)
    number = store.add(DEATHS, 1) - 1
    store.set(DEATH.format(number), json.dumps({"member": member, "pid": child.pid, "how": child.how}))
