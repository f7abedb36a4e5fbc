"""Functions in processes of their own: with an environment, a time limit, and an end that takes their children along.

A process here ends with the one that started it, also where that one is killed. What it starts in turn by these
functions does the same, so a call that is cut off leaves nothing on the GPU.
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

from moevement_core.restart.environment import PARENT_ENV

ROOT = Path(__file__).parents[2]


class ProcessFailed(RuntimeError):
    """A process that ended without a result."""


class Process:
    """A function of a module in a new interpreter.

    Args:
        function: at the top of a module.
        arguments: of it, as JSON can hold them.
        environment: beside that of this process; None: the variable is not set.
        log: file for its output; None: it is kept for the message of :class:`ProcessFailed`.
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
        """Wait for the end; return the exit code.

        Raises:
            TimeoutError: it runs longer.
        """
        try:
            return self._popen.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"did not end in {limit_s:g} s") from None

    def result(self, limit_s: float) -> Any:
        """Return what the function returned.

        Raises:
            TimeoutError: it runs longer.
            ProcessFailed: it ended without a result.
        """
        code = self.wait(limit_s)
        if code != 0 or not self._result.exists():
            raise ProcessFailed(f"exit code {code}: {self.tail()}")
        return json.loads(self._result.read_text(encoding="utf-8"))

    def tail(self, lines: int = 12) -> str:
        """Return the end of the output."""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])

    def kill(self) -> None:
        """End it and everything that it has started, and wait for that."""
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
    """Return what ``function`` returns in a process of its own.

    Raises:
        TimeoutError: it runs longer than ``limit_s``.
        ProcessFailed: it ended without a result.
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
    """Return what ``function`` returns on each of ``world`` ranks, which can meet in a store on this host.

    A rank that fails, or does not end in time, gives its error as text that begins with ``failed:``.

    Args:
        function: called with ``rank``, ``world``, ``port`` of a ``torch.distributed.TCPStore`` on loopback, and
            ``arguments``.
        world: number of ranks.
        limit_s: for all of them together, seconds.
        environments: of each rank.
        arguments: of all ranks.
    """
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    deadline = time.monotonic() + limit_s
    with contextlib.ExitStack() as running:
        ranks = [
            running.enter_context(
                Process(
                    function,
                    {**arguments, "rank": rank, "world": world, "port": store.port},
                    {"LOCAL_RANK": str(rank), **(environments[rank] if environments else {})},
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
