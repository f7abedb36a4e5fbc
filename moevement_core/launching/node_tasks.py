"""Commands that start the tasks (supervisors) of a job, one command for each node.

For example ``srun --nodes=1 --nodelist={host} ...``.

Each node has its own command, because the loss of one node may end a command that spans several nodes: srun aborts a
whole step when one of its nodes reboots before Slurm has noticed that the node was down.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from moevement_core.errors import ConfigError
from moevement_core.util.environment import FIRST_TASK_ENV, START_ENV, TASKS_ENV

HOST = "{host}"
"""Placeholder in a command for the name of the node. Ranks replace another placeholder, {node}, in paths."""
FIRST_DELAY_S, LONGEST_DELAY_S = 5.0, 300.0
"""Bounds in seconds on the backoff before a restart of a command.

The backoff doubles each time that the command ends early (:data:`AT_ONCE_S`). Any other end sets it to the lower bound.
"""
AT_ONCE_S = 20.0
"""Seconds from the start of a command in which its end counts as early, because the node is probably still down."""
TRIES = 3
"""Number of times that the coordinator starts a node's tasks before the job begins. If they end each time, it stops the
job."""
GONE_S = 5.0
"""Seconds without a connection from any task of a node after which the coordinator sends SIGTERM to the node's command.

A live task reconnects within a tenth of the lease time.
"""
KILL_S = 2.0
"""Seconds from SIGTERM to SIGKILL for a command. In this time srun notifies Slurm, and then waits for the tasks."""


@dataclass(frozen=True)
class NodeCommand:
    """Command that starts the tasks of a node, with the nodes for which the coordinator runs it.

    Raises:
        ConfigError: the command is the same for every node, or the nodes or the number of tasks are invalid.
    """

    nodes: Sequence[str]
    tasks_per_node: int
    words: Sequence[str]
    """Words of the command; the name of the node replaces ``{host}``."""

    def __post_init__(self) -> None:
        if not self.nodes or not all(self.nodes) or len(set(self.nodes)) < len(self.nodes):
            raise ConfigError(f"--nodes {','.join(self.nodes)}: needs the names of different nodes, as in n1,n2")
        if self.tasks_per_node < 1:
            raise ConfigError(f"--tasks-per-node {self.tasks_per_node}: needs 1 or more")
        if len(self.nodes) > 1 and not any(HOST in word for word in self.words):
            raise ConfigError(
                f"{self.words[0]} ... has no {HOST}, so it would start the same tasks {len(self.nodes)} times; "
                f"name the node, as in srun --nodes=1 --nodelist={HOST}"
            )

    def on(self, node: str) -> list[str]:
        """Return the command for one node."""
        return [word.replace(HOST, node) for word in self.words]


class _Node:
    """Command of one node: its current process, its backoff, and the connections of its tasks."""

    def __init__(self, name: str, command: list[str], environment: Mapping[str, str]) -> None:
        self.name = name
        self._command, self._environment = command, environment
        self.starts = 0
        self._delay_s = FIRST_DELAY_S
        self.start()

    def start(self) -> None:
        """Start the command under a new start name, ``NODE/NUMBER``, which its tasks report to the coordinator.

        Raises:
            OSError: no process can be started.
        """
        name = f"{self.name}/{self.starts + 1}"
        environment = {**os.environ, **self._environment, START_ENV: name}
        self.process = subprocess.Popen(self._command, env=environment)
        self.start_name, self.starts = name, self.starts + 1
        self._started_at = time.monotonic()
        self._was_connected = self._is_asked = False
        self.gone_at: float | None = None
        self.ended_at: float | None = None

    def look(self, connected: Collection[str]) -> None:
        """Note whether a task of the command's current process is connected, and when the last connection was lost.

        Args:
            connected: start names (``NODE/NUMBER``) with at least one task that is connected to the coordinator.
        """
        if self.start_name in connected:
            self._was_connected, self.gone_at = True, None
        elif self._was_connected and self.gone_at is None:
            self.gone_at = time.monotonic()

    def end_without_tasks(self) -> bool:
        """End the command if it still runs although its tasks are gone: SIGTERM first, SIGKILL after :data:`KILL_S`.

        This is necessary because ``srun`` may not notice that a node has rebooted.

        Returns:
            True if this call has sent SIGTERM.
        """
        if self.gone_at is None or self.process.poll() is not None:
            return False
        gone_s = time.monotonic() - self.gone_at
        if gone_s > GONE_S + KILL_S:
            self.process.kill()
        elif gone_s > GONE_S and not self._is_asked:
            self._is_asked = True
            self.process.terminate()
            return True
        return False

    def note_end(self) -> bool:
        """Schedule a restart if the command has ended since the last call; return True in this case."""
        if self.ended_at is not None or self.process.poll() is None:
            return False
        self.ended_at = time.monotonic()
        if self.ended_at - self._started_at > AT_ONCE_S:
            self._delay_s = FIRST_DELAY_S
        self.put_off()
        return True

    def put_off(self) -> None:
        """Schedule the next start of the command after the current backoff, and double the backoff."""
        self.start_at = time.monotonic() + self._delay_s
        self._delay_s = min(2 * self._delay_s, LONGEST_DELAY_S)


class NodeTasks:
    """Tasks of all nodes. If the tasks of a node end and the job continues, this object starts them again.

    So a node that reboots during the job, and still belongs to the job's allocation, joins the job again. Its processes
    become spares.

    Args:
        command: the command for each node.
        environment: variables for all commands, in addition to this process's own.
        report: called with a line of text for the user.
    """

    def __init__(self, command: NodeCommand, environment: Mapping[str, str], report: Callable[[str], None]) -> None:
        self._report = report
        self.failed: str | None = None
        """Reason why the job cannot begin; None while the job can still begin."""
        tasks = len(command.nodes) * command.tasks_per_node
        self._nodes: list[_Node] = []
        for number, node in enumerate(command.nodes):
            own = {FIRST_TASK_ENV: str(number * command.tasks_per_node), TASKS_ENV: str(tasks)}
            self._nodes.append(_Node(node, command.on(node), {**environment, **own}))

    @property
    def are_running(self) -> bool:
        """True if the command of any node runs."""
        return any(node.process.poll() is None for node in self._nodes)

    @property
    def how_they_ended(self) -> str:
        """Exit codes of the commands of all nodes, in words, for the message that says why the job has ended."""
        return "; ".join(f"the tasks of {node.name} ended with exit code {node.process.poll()}" for node in self._nodes)

    def step(self, connected: Collection[str], heard: Collection[str], *, has_begun: bool) -> None:
        """Check every command, and restart ended commands after a backoff; the coordinator calls this in its loop.

        Args:
            connected: start names (``NODE/NUMBER``) with at least one task that is connected to the coordinator.
            heard: start names with at least one task that has sent a message within the lease time.
            has_begun: True if the job was formed. If it was not, and a node's tasks have ended :data:`TRIES` times, the
                method sets :attr:`failed`.
        """
        for node in self._nodes:
            node.look(connected)
            if has_begun and node.end_without_tasks():
                self._report(f"the tasks of {node.name} are gone; ending the command that started them")
            if node.note_end():
                code, wait_s = node.process.returncode, node.start_at - time.monotonic()
                if not has_begun and node.starts >= TRIES:
                    self.failed = f"the tasks of {node.name} ended {TRIES} times with code {code} before the job began"
                    return
                self._report(f"the tasks of {node.name} ended with exit code {code}; next start in {wait_s:.0f} s")
            # If a command was killed but its tasks live on, the command is not started again.
            live = any(start.startswith(f"{node.name}/") for start in heard)
            if node.ended_at is not None and time.monotonic() > node.start_at and not live:
                self._start_again(node)

    def _start_again(self, node: _Node) -> None:
        try:
            node.start()
        except OSError as error:  # This host has no memory or process left for now. The job and other nodes go on.
            self._report(f"the tasks of {node.name} cannot be started: {error.strerror}; the coordinator tries again")
            node.put_off()

    def wait_and_kill(self, grace_s: float) -> None:
        """Wait for the commands to end by themselves, and kill those that have not ended in time.

        Args:
            grace_s: seconds to wait for all commands together.
        """
        deadline = time.monotonic() + grace_s
        for node in self._nodes:
            try:
                node.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                node.process.kill()
                node.process.wait()

    def end(self, grace_s: float) -> None:
        """Send SIGTERM to all running commands, and kill commands that have not ended after ``grace_s`` seconds."""
        for node in self._nodes:
            if node.process.poll() is None:
                node.process.terminate()
        self.wait_and_kill(grace_s)
