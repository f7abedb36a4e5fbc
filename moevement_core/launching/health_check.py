"""Health command of a node (``--moevement-health-check``): while it fails, the ranks of the node move elsewhere.

The check has no thread, because its process forks the processes of ranks: a lock that a thread held at that moment
would stay locked in them. The command may hang with the node's disk or device, so nothing waits for it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from contextlib import suppress

from moevement_core.util.environment import NODE_ENV

LIMIT_S = 60.0
"""Longest time in seconds that the command may take. A command that takes longer has failed, and is killed."""
MOST = 200
"""Largest number of characters of the command's output in the reason."""


class HealthCheck:
    """Check of one node. One thread calls :meth:`step` often, which never blocks.

    Args:
        command: command line for the shell. It fails with an exit code other than 0; its last line says why.
        node: name of the node.
        period_s: seconds from the end of one run to the next.
        limit_s: longest time in seconds that a run may take.
    """

    def __init__(self, command: str, node: str, *, period_s: float, limit_s: float = LIMIT_S) -> None:
        self.reason = ""
        """Reason for which the node is not healthy; empty if it is, or before the end of the first run."""
        self._command, self._node, self._period_s, self._limit_s = command, node, period_s, limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._was_killed = False
        self._changed_at = -float("inf")
        """Time at which the newest run began or ended, in monotonic seconds."""
        self._output = tempfile.TemporaryFile()  # noqa: SIM115, closed in close()

    def step(self) -> None:
        """Start the command if it is due, and take in its result if it has ended."""
        now = time.monotonic()
        if self._process is None:
            if now - self._changed_at >= self._period_s:
                self._changed_at = now
                self._start()
        elif self._process.poll() is not None:
            self.reason = self._reason(self._process.returncode)
            self._process, self._changed_at = None, now
        elif now - self._changed_at > self._limit_s:
            self._was_killed = True
            self._kill()

    def close(self) -> None:
        """End the command if it runs; do not wait for it."""
        if self._process is not None:
            self._kill()
        self._output.close()

    def _start(self) -> None:
        self._was_killed = False
        self._output.seek(0)
        self._output.truncate()
        try:
            self._process = subprocess.Popen(
                self._command, shell=True, stdin=subprocess.DEVNULL, stdout=self._output, stderr=subprocess.STDOUT,
                start_new_session=True, env={**os.environ, NODE_ENV: self._node},
            )  # fmt: skip
        except OSError as error:
            self.reason = f"the health check cannot be started: {error}"

    def _kill(self) -> None:
        assert self._process is not None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _reason(self, code: int) -> str:
        """Return the reason why a run failed; empty if it did not fail."""
        if code == 0:
            return ""
        if self._was_killed:
            return f"the health check took longer than {self._limit_s:g} s"
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
        return f"the health check ended with {code}: {last[:MOST]}"
