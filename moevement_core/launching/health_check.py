"""Health command of a node (``--moevement-health-check``): while it fails, the ranks of the node move elsewhere."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from contextlib import suppress

from moevement_core.util.environment import NODE_ENV

LIMIT_S = 60.0
"""Longest time in seconds that the command may take. A command that takes longer has failed, and is killed."""
MOST = 200
"""Largest number of characters of the command's output in the reason."""


class HealthCheck:
    """Check of one node, on a thread of its own: the command may hang with the node's disk or device.

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
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="moevement-health", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; do not wait for a command that hangs."""
        self._ends.set()

    def _run(self) -> None:
        while not self._ends.is_set():
            self.reason = self._once()
            self._ends.wait(self._period_s)

    def _once(self) -> str:
        """Run the command once, and return the reason why it failed; empty if it did not fail."""
        try:
            process = subprocess.Popen(
                self._command, shell=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, errors="replace", start_new_session=True, env={**os.environ, NODE_ENV: self._node},
            )  # fmt: skip
        except OSError as error:
            return f"the health check cannot be started: {error}"
        try:
            output, _ = process.communicate(timeout=self._limit_s)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            return f"the health check took longer than {self._limit_s:g} s"
        if process.returncode == 0:
            return ""
        lines = output.split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
        return f"the health check ended with {process.returncode}: {last[:MOST]}"
