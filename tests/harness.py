"""Runner of test bodies on N gloo ranks. It names the failed rank, never hangs, and leaves no process behind.

A fork server imports Megatron once per test session. Each rank is a fork of the server, so it starts in milliseconds
and inherits no thread of the test's own process. Each rank leads its own process group. The runner kills the group when
the body ends, checkpoint writers included.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from moevement_core.comms.token import Token
from moevement_core.errors import ProcessGroupError
from moevement_core.util.environment import STORE_ENV
from tests.limits import HANGS_S

KILLED = "the process was killed"
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.preload"])


@dataclass(frozen=True)
class Outcome:
    """Outcome of a rank: its exit code, return value, error and output."""

    rank: int
    exit_code: int
    """Exit code: 0, the code of ``sys.exit``, 1 for an exception, or minus the signal that killed the rank."""
    result: Any
    """Return value of the body."""
    error: str
    """Traceback of the exception; empty if there was none."""
    output: str
    """Output of the rank, both streams in order."""


def run_ranks(
    body: Callable[..., Any],
    nproc: int,
    *args: Any,
    timeout_s: float = HANGS_S,
    environment: dict[str, str] | None = None,
    init_process_group: bool = True,
    check: bool = True,
    on_started: Callable[[list[int]], None] | None = None,
) -> list[Outcome]:
    """Run ``body(*args)`` on ``nproc`` ranks and return the outcome of each.

    Args:
        body: a function of a module. It is called with torch's environment variables set and, if
            ``init_process_group``, with the gloo process group initialised.
        check: raise an error if any rank failed.
        on_started: called with the process ids of the ranks, so that a test can kill one.

    Raises:
        ProcessGroupError: a rank failed (the message has its traceback and output), or the ranks ran out of time.
    """
    import torch

    listener = socket.create_server(("127.0.0.1", 0), backlog=nproc + 8)
    port = listener.getsockname()[1]
    store = torch.distributed.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(),
        timeout=timedelta(seconds=timeout_s),
    )  # fmt: skip
    common = {
        "WORLD_SIZE": str(nproc), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        STORE_ENV: f"127.0.0.1:{port}", **Token.new().environment, **(environment or {}),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(nproc):
            receiver, sender = context.Pipe(duplex=False)
            log = Path(folder) / f"{rank}.log"
            log.touch()
            rank_environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = context.Process(
                target=_rank_main, args=(body, args, rank_environment, str(log), sender, init_process_group)
            )
            process.start()
            sender.close()
            started.append((process, receiver, log))
        try:
            if on_started is not None:
                on_started([process.pid for process, _, _ in started])  # type: ignore[misc]
            answers = _collect([connection for _, connection, _ in started], timeout_s, stop_at_failure=check)
        finally:
            for process, _, _ in started:
                _kill_group(process)
        outcomes = []
        for rank, (process, _, log) in enumerate(started):
            exit_code, result, error = answers.get(rank, (process.exitcode or -9, None, ""))
            if error == KILLED and process.exitcode:
                exit_code, error = process.exitcode, f"{KILLED} by signal {-process.exitcode}"
            outcomes.append(Outcome(rank, exit_code, result, error, log.read_text(errors="replace")))
        del store
    if check:
        _raise_for_failures(outcomes, answers, timeout_s)
    return outcomes


def _collect(connections: list[Connection], timeout_s: float, *, stop_at_failure: bool) -> dict[int, Any]:
    """Return the answer of each rank. A killed rank has a stand-in; a rank that ran out of time is missing."""
    deadline = time.monotonic() + timeout_s
    answers: dict[int, Any] = {}
    pending = dict(zip(connections, range(len(connections)), strict=True))
    while pending and (left := deadline - time.monotonic()) > 0:
        for ready in wait(list(pending), timeout=left):
            assert isinstance(ready, Connection)
            rank = pending.pop(ready)
            try:
                answers[rank] = ready.recv()
            except EOFError:
                answers[rank] = (-int(signal.SIGKILL), None, KILLED)
            if answers[rank][0] != 0 and stop_at_failure:
                return answers
    return answers


def _raise_for_failures(outcomes: list[Outcome], answers: dict[int, Any], timeout_s: float) -> None:
    failed = [outcome for outcome in outcomes if outcome.rank in answers and outcome.exit_code != 0]
    if failed:
        worst = failed[0]
        raise ProcessGroupError(
            f"rank {worst.rank} ended with {worst.exit_code}:\n{worst.error}\n--- its output:\n{worst.output[-6000:]}"
        )
    if len(answers) < len(outcomes):
        late = [outcome for outcome in outcomes if outcome.rank not in answers]
        raise ProcessGroupError(
            f"ranks {[o.rank for o in late]} did not end within {timeout_s:.0f} s; "
            f"output of rank {late[0].rank}:\n{late[0].output[-6000:]}"
        )


def _kill_group(process: Any) -> None:
    if process.pid is None:
        return
    # Kill the leader first. If it has no group yet, it has no children either; otherwise its group outlives it.
    process.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join(10)


def _rank_main(
    body: Callable[..., Any],
    args: tuple[Any, ...],
    environment: dict[str, str],
    log: str,
    answer: Connection,
    init_process_group: bool,
) -> None:
    os.setpgid(0, 0)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(environment)
    import torch

    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    outcome: tuple[int, Any, str]
    try:
        if init_process_group:
            host, port = environment[STORE_ENV].split(":")
            store = torch.distributed.TCPStore(host, int(port), is_master=False)
            torch.distributed.init_process_group(
                "gloo", store=store, rank=int(environment["RANK"]), world_size=int(environment["WORLD_SIZE"])
            )
        outcome = (0, body(*args), "")
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        outcome = (code, None, f"sys.exit({exit_.code!r})")
    except BaseException:
        outcome = (1, None, traceback.format_exc())
    answer.send(outcome)
    answer.close()
    # The parent kills this group next. os._exit does not wait for gloo's threads, so they cannot delay that.
    os._exit(outcome[0])
