"""Calls of functions in new processes, with an environment and a time limit.

A process ends with its parent, even if the parent is killed. The same holds for the processes that it starts with this
module. So an interrupted call leaves nothing on the GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from moevement_core.util.environment import PARENT_ENV

ROOT = Path(__file__).parents[2]


class ProcessFailed(RuntimeError):
    """Exception for a process that ended without a result."""


class Process:
    """New interpreter that runs one function of a module.

    Args:
        function: function at the top level of a module.
        arguments: keyword arguments of the function. JSON must be able to hold them.
        environment: variables in addition to those of this process. A value of None removes the variable.
        log: file for the output. None: a temporary file, for the message of :class:`ProcessFailed`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
        environment: Mapping[str, str | None] | None = None,
        log: Path | None = None,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._result = Path(self._folder.name) / "result.json"
        self.log = log or Path(self._folder.name) / "log"
        paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
        variables: dict[str, str | None] = {
            **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **(environment or {}),
            PARENT_ENV: str(os.getpid()),
        }  # fmt: skip
        with self.log.open("wb") as output:
            self._popen = subprocess.Popen(
                [
                    sys.executable, "-W", "ignore", "-m", "benchmarks.gpu.child",
                    f"{function.__module__}:{function.__qualname__}", json.dumps(arguments), str(self._result),
                ],
                cwd=ROOT,
                env={name: value for name, value in variables.items() if value is not None},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._folder.cleanup()

    @property
    def pid(self) -> int:
        """Process identifier of the child."""
        return self._popen.pid

    def wait(self, limit_s: float) -> int:
        """Wait for the end of the process, and return its exit code.

        Raises:
            TimeoutError: the process runs longer than ``limit_s``.
        """
        try:
            return self._popen.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"did not end in {limit_s:g} s") from None

    def result(self, limit_s: float) -> Any:
        """Return the return value of the function.

        Raises:
            TimeoutError: the process runs longer than ``limit_s``.
            ProcessFailed: the process ended without a result.
        """
        code = self.wait(limit_s)
        if code != 0 or not self._result.exists():
            raise ProcessFailed(f"exit code {code}: {self.tail()}")
        return json.loads(self._result.read_text(encoding="utf-8"))

    def tail(self, lines: int = 12) -> str:
        """Return the last lines of the output."""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])

    def kill(self) -> None:
        """Kill the process and all its descendants, and wait for their end."""
        with contextlib.suppress(psutil.NoSuchProcess):
            started = psutil.Process(self.pid).children(recursive=True)
            for process in started:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(started, timeout=10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._popen.wait()


def call(
    function: Callable[..., Any], limit_s: float, environment: Mapping[str, str | None] | None = None, **arguments: Any
) -> Any:
    """Call ``function`` in a new process, and return its return value.

    Raises:
        TimeoutError: the process runs longer than ``limit_s``.
        ProcessFailed: the process ended without a result.
    """
    with Process(function, arguments, environment) as process:
        return process.result(limit_s)


def call_ranks(
    function: Callable[..., Any],
    world: int,
    limit_s: float,
    environments: Sequence[Mapping[str, str]] | None = None,
    **arguments: Any,
) -> list[Any]:
    """Call ``function`` on ``world`` ranks, each in a new process, and return the return value of each rank.

    If a rank fails or exceeds the limit, its result is a text that begins with ``failed:``.

    Args:
        function: function of each rank. It gets ``rank``, ``world``, the ``port`` of a ``torch.distributed.TCPStore``
            on loopback, and ``arguments``.
        world: number of ranks.
        limit_s: limit for all ranks together, in seconds.
        environments: additional environment variables of each rank.
        arguments: arguments that are the same on all ranks.
    """
    from torch.distributed import TCPStore

    from benchmarks.gpu import shared

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    deadline = time.monotonic() + limit_s
    with contextlib.ExitStack() as running:
        ranks = [
            running.enter_context(
                Process(
                    function,
                    {**arguments, "rank": rank, "world": world, "port": store.port},
                    {
                        "LOCAL_RANK": str(rank),
                        **(shared.environment(f"rank-{rank}") if shared.is_shared() else {}),
                        **(environments[rank] if environments else {}),
                    },
                )
            )
            for rank in range(world)
        ]
        results = []
        for process in ranks:
            try:
                results.append(process.result(max(0.1, deadline - time.monotonic())))
            except (TimeoutError, ProcessFailed) as error:
                results.append(f"failed: {error}")
        return results
