"""The commands that start the tasks of a job, one for each node (``srun --nodes=1 --nodelist={host} ...``).

Each node has a command of its own because a command that spans nodes may take all of them down for one: srun aborts a
whole step when a node of it is booted again before Slurm has noticed that it was gone.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from moevement_core.errors import ConfigError
from moevement_core.restart.environment import FIRST_TASK_ENV, START_ENV, TASKS_ENV

HOST = "{host}"
"""Stands in a command for the name of the node; {node} in a path is for the ranks to replace."""
FIRST_DELAY_S, LONGEST_DELAY_S = 5.0, 300.0
"""How long after its end a command is started again, while the job goes on: twice as long each time it ends at once."""
AT_ONCE_S = 20.0
"""What ends before that could not begin, as where a node is still away."""
TRIES = 3
"""How often the tasks of a node may end before the job has begun; then it is stopped."""
GONE_S = 5.0
"""How long no task of a node may have a connection; one that lives makes a new one within a tenth of the lease time."""
KILL_S = 2.0
"""How long a command whose tasks are gone has to end when it is asked to; srun tells Slurm, and then waits for them."""


@dataclass(frozen=True)
class NodeCommand:
    """How the tasks of a node are started.

    Raises:
        ConfigError: the command is the same for every node, or there are no nodes.
    """

    nodes: Sequence[str]
    tasks_per_node: int
    words: Sequence[str]
    """The command; ``{host}`` in it becomes the name of the node."""

    def __post_init__(self) -> None:
        if not self.nodes or not all(self.nodes) or len(set(self.nodes)) < len(self.nodes):
            raise ConfigError(f"--nodes {','.join(self.nodes)}: needs the names of different nodes, as in n1,n2")
        if self.tasks_per_node < 1:
            raise ConfigError(f"--tasks-per-node {self.tasks_per_node}: needs 1 or more")
        if len(self.nodes) > 1 and not any(HOST in word for word in self.words):
            raise ConfigError(
                f"{self.words[0]} ... has no {HOST}, so it would start the same tasks {len(self.nodes)} times; "
                f"say where, as in srun --nodes=1 --nodelist={HOST}"
            )

    def on(self, node: str) -> list[str]:
        """The command for one node."""
        return [word.replace(HOST, node) for word in self.words]


class _Node:
    """The command of one node, as often as it was started."""

    def __init__(self, name: str, command: list[str], environment: Mapping[str, str]) -> None:
        self.name = name
        self._command, self._environment = command, environment
        self.starts = 0
        self._delay_s = FIRST_DELAY_S
        self.start()

    def start(self) -> None:
        """Run the command."""
        name = f"{self.name}/{self.starts + 1}"
        environment = {**os.environ, **self._environment, START_ENV: name}
        self.process = subprocess.Popen(self._command, env=environment)
        self.start_name, self.starts = name, self.starts + 1
        self._started_at = time.monotonic()
        self._was_connected = self._is_asked = False
        self.gone_at: float | None = None
        self.ended_at: float | None = None

    def look(self, connected: Collection[str]) -> None:
        """Take in whether any of the tasks has a connection."""
        if self.start_name in connected:
            self._was_connected, self.gone_at = True, None
        elif self._was_connected and self.gone_at is None:
            self.gone_at = time.monotonic()

    def end_without_tasks(self) -> bool:
        """End the command if its tasks are gone and it does not end by itself; whether it was asked to now.

        srun does not notice that a node was booted again if its connections were reset.
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
        """Whether it has ended since the last call."""
        if self.ended_at is not None or self.process.poll() is None:
            return False
        self.ended_at = time.monotonic()
        if self.ended_at - self._started_at > AT_ONCE_S:
            self._delay_s = FIRST_DELAY_S
        self.put_off()
        return True

    def put_off(self) -> None:
        """Start it later: after a pause that is twice as long as the last one."""
        self.start_at = time.monotonic() + self._delay_s
        self._delay_s = min(2 * self._delay_s, LONGEST_DELAY_S)


class NodeTasks:
    """The tasks of all nodes; those of a node are started again when they have ended and the job goes on.

    So a node that is booted again while the job holds it rejoins by itself: its processes are spares then.

    Args:
        command: for each node.
        environment: for all, beyond this process's own.
        report: called with what an operator should know.
    """

    def __init__(self, command: NodeCommand, environment: Mapping[str, str], report: Callable[[str], None]) -> None:
        self._report = report
        self.failed: str | None = None
        """Why the job cannot begin, in words, once that is known."""
        tasks = len(command.nodes) * command.tasks_per_node
        self._nodes: list[_Node] = []
        for number, node in enumerate(command.nodes):
            own = {FIRST_TASK_ENV: str(number * command.tasks_per_node), TASKS_ENV: str(tasks)}
            self._nodes.append(_Node(node, command.on(node), {**environment, **own}))

    @property
    def are_running(self) -> bool:
        """Whether the command of any node runs."""
        return any(node.process.poll() is None for node in self._nodes)

    @property
    def how_they_ended(self) -> str:
        """In words, for the reason why a job has ended."""
        return "; ".join(f"the tasks of {node.name} ended with {node.process.poll()}" for node in self._nodes)

    def step(self, connected: Collection[str], heard: Collection[str], *, has_begun: bool) -> None:
        """Start again what has ended, after a while.

        Args:
            connected: starts of which a task is connected to the coordinator.
            heard: starts of which a task has been heard of within the lease time.
            has_begun: whether the job has. Before that, what ends again and again is a mistake, and stops it.
        """
        for node in self._nodes:
            node.look(connected)
            if has_begun and node.end_without_tasks():
                self._report(f"the tasks of {node.name} are gone; ending what started them")
            if node.note_end():
                code, wait_s = node.process.returncode, node.start_at - time.monotonic()
                if not has_begun and node.starts >= TRIES:
                    self.failed = f"the tasks of {node.name} ended {TRIES} times with {code} before the job began"
                    return
                self._report(f"the tasks of {node.name} ended with {code}; started again in {wait_s:.0f} s")
            # The command may have been killed alone: tasks that live keep their node.
            live = any(start.startswith(f"{node.name}/") for start in heard)
            if node.ended_at is not None and time.monotonic() > node.start_at and not live:
                self._start_again(node)

    def _start_again(self, node: _Node) -> None:
        try:
            node.start()
        except OSError as error:  # no memory or no process to be had now: the job goes on, and so do the other nodes
            self._report(f"the tasks of {node.name} cannot be started: {error.strerror}; tried again")
            node.put_off()

    def wait_and_kill(self, grace_s: float) -> None:
        """Give the commands so long to end by themselves, and kill those that do not."""
        deadline = time.monotonic() + grace_s
        for node in self._nodes:
            try:
                node.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                node.process.kill()
                node.process.wait()

    def end(self, grace_s: float) -> None:
        """End the commands now."""
        for node in self._nodes:
            if node.process.poll() is None:
                node.process.terminate()
        self.wait_and_kill(grace_s)
