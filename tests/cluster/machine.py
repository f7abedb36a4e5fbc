"""Machine made of Linux namespaces: own host name, network stack, processes, shared memory and local disk.

The machine has the file system of the host, which stands for the one that all nodes of a cluster share. Only
``<folder>/local`` has other contents on every machine, as a node's own disk.

A machine lives as long as its first process. That process dies with the process that created the machine (parent-death
signal), and the kernel ends all others with it. So no process is left even if no cleanup runs. A descriptor keeps the
network stack alive after the processes have ended, so it answers their peers with resets.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.limits import HANGS_S

# The first process of a machine is the parent of all orphans there. It is bash, because bash reaps them.
_BOOT = """
set -e
hostname {name}
mount --bind {folder}/hosts /etc/hosts
mount --bind {own}/disk {folder}/local
mount -t tmpfs shm /dev/shm
ip link set lo up
echo booted
while :; do sleep 3600 & wait $!; done
"""

# Unlike with `ip netns exec`, /sys is not mounted again, because slurmd looks for cgroups there.
_MAKE = (
    "setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork",
    "--kill-child=KILL", "--mount-proc",
)  # fmt: skip


class Machine:
    """Namespaces of a machine and the processes in them.

    Args:
        name: host name.
        folder: folder of the cluster, with the file ``hosts`` and the folder ``local`` in it.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.own = folder / name
        """Folder on the host with this machine's disk, its logs, and the files that Slurm keeps for it."""
        self._maker: subprocess.Popen[str] | None = None
        self._network: int | None = None
        self._first, self._processes_namespace = 0, ""

    @property
    def is_up(self) -> bool:
        """True if the machine has processes."""
        return self._maker is not None and self._maker.poll() is None

    @property
    def network(self) -> str:
        """Path of the network namespace, for ``nsenter --net`` and ``ip link set ... netns``."""
        assert self._network is not None, f"{self.name} was never switched on"
        return f"/proc/{os.getpid()}/fd/{self._network}"

    def switch_on(self) -> None:
        """Start the first process, with a network stack without interfaces and the disk as it was left."""
        assert not self.is_up, f"{self.name} is on"
        self.switch_off()
        (self.own / "disk").mkdir(parents=True, exist_ok=True)
        script = _BOOT.format(name=self.name, folder=self.folder, own=self.own)
        with (self.own / "boot.log").open("w") as log:
            self._maker = subprocess.Popen(
                [*_MAKE, "bash", "-c", script], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True,
                start_new_session=True,  # Ctrl-C is for pytest, which ends machines itself
            )  # fmt: skip
        assert self._maker.stdout is not None
        if self._maker.stdout.readline() != "booted\n":
            raise RuntimeError(f"{self.name} does not boot: {(self.own / 'boot.log').read_text()}")
        self._network = os.open(f"/proc/{self._maker.pid}/ns/net", os.O_RDONLY)
        self._first = psutil.Process(self._maker.pid).children()[0].pid
        self._processes_namespace = _namespace_of(self._first) or ""

    def kill(self) -> None:
        """End all processes at once; the network stack stays and answers their peers."""
        if self._maker is None:
            return
        if self._first:
            # When the first process ends, the kernel ends all others. ``unshare`` ends last, because it reaps the
            # first.
            send(self._first, signal.SIGKILL)
            self._maker.wait(HANGS_S)
        self._maker.kill()
        self._maker.wait()
        self._first = 0
        assert self._maker.stdout is not None
        self._maker.stdout.close()
        self._maker = None
        wait_until(lambda: not self._all(), f"the processes of {self.name} end")

    def switch_off(self) -> None:
        """End all processes and release the network stack."""
        self.kill()
        if self._network is not None:
            os.close(self._network)
            self._network = None

    def command(self, *words: str | Path) -> list[str]:
        """Return the command that runs ``words`` on this machine, in ``/``, with their exit code."""
        assert self.is_up, f"{self.name} is off"
        return ["nsenter", "--target", str(self._first), "--all", "--", *(str(word) for word in words)]

    def run(self, *words: str | Path, timeout_s: float = HANGS_S, environment: dict[str, str] | None = None) -> str:
        """Run a program to its end and return its standard output.

        Raises:
            RuntimeError: the program failed; the message has its output.
        """
        return output_of(*self.command(*words), timeout_s=timeout_s, environment=environment)

    def start(self, *words: str | Path, log: Path, environment: dict[str, str] | None = None) -> None:
        """Start a daemon as a child of the first process; append both its streams to ``log``."""
        # Not as a child of nsenter, which stops together with its child but does not resume with it.
        with log.open("a") as stream:
            subprocess.run(
                self.command("setsid", "--fork", *words), stdin=subprocess.DEVNULL, stdout=stream,
                stderr=subprocess.STDOUT, env=environment, check=True,
            )  # fmt: skip

    def processes(self) -> list[int]:
        """Return the host's ids of all processes of the machine, except for the first process."""
        return [pid for pid in self._all() if pid != self._first]

    def tasks(self) -> list[int]:
        """Return the host's ids of the job's tasks here: launchers that no other launcher has started."""
        launchers = [process for process in map(psutil.Process, self.processes()) if "launch" in process.cmdline()]
        return [launcher.pid for launcher in launchers if launcher.ppid() not in {each.pid for each in launchers}]

    def stop(self) -> None:
        """Stop all processes, also those that they fork meanwhile, and wait until all their threads have stopped."""

        def all_stand_still() -> bool:
            moving = [pid for pid in self.processes() if not _is_stopped(pid)]
            for pid in moving:
                send(pid, signal.SIGSTOP)
            return not moving

        wait_until(all_stand_still, f"all processes of {self.name} are stopped")

    def go_on(self) -> None:
        """Resume all processes after :meth:`stop`."""
        for pid in self.processes():
            send(pid, signal.SIGCONT)

    def host_pid(self, pid: int) -> int:
        """Return the host's id of the process that has the id ``pid`` on this machine, as in ``ranks.json``.

        Raises:
            ProcessLookupError: this machine has no such process.
        """
        for candidate in self.processes():
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{candidate}/status").read_text()
                numbers = next(line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:"))
                if numbers[-1] == str(pid):
                    return candidate
        raise ProcessLookupError(f"{self.name} has no process {pid}")

    def _all(self) -> list[int]:
        return [pid for pid in psutil.pids() if _namespace_of(pid) == self._processes_namespace]


def _namespace_of(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:  # it has ended
        return None


def _is_stopped(pid: int) -> bool:
    """Return True if all threads of a process have stopped or ended."""
    states = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                states.append(thread.joinpath("stat").read_text().rpartition(")")[2].split()[0])
    return set(states) <= set("TtZX")


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal; nothing happens if the process has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def output_of(*words: str, timeout_s: float = HANGS_S, environment: dict[str, str] | None = None) -> str:
    """Run a program on the host to its end and return its standard output.

    Raises:
        RuntimeError: the program failed; the message has its output.
    """
    done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, env=environment, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def wait_until(
    holds: Callable[[], bool],
    goal: str,
    why_not: Callable[[], str] = str,
    *,
    timeout_s: float = HANGS_S,
    poll_s: float = 0.05,
) -> None:
    """Wait until ``holds()`` is true.

    Args:
        holds: condition, which is polled.
        goal: condition in words, for the message.
        why_not: function that returns more text for the message.
        timeout_s: longest wait in seconds.
        poll_s: seconds between two polls.

    Raises:
        TimeoutError: the condition stayed false.
    """
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:.0f} s until {goal}. {why_not()}")
        time.sleep(poll_s)
