"""A machine made of Linux namespaces: own host name, network stack, processes, shared memory and local disk.

The file system is that of the host and stands for the one that all nodes of a cluster share. ``<folder>/local`` has the
same path on every machine and other contents, as a node's own disk.

A machine lives as long as its first process. That one dies with the process that made the machine (parent-death
signal), and the kernel ends all others with it, so nothing runs on even where nobody could clean up. The network stack
is held by a descriptor and outlives the processes, so that it answers their peers with resets.
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

# The first process of a machine is the parent of all orphans there, and bash reaps those.
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

# /sys is not mounted again as `ip netns exec` does: slurmd looks for cgroups there.
_MAKE = (
    "setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork",
    "--kill-child=KILL", "--mount-proc",
)  # fmt: skip


class Machine:
    """Namespaces and the processes in them.

    Args:
        name: the host name.
        folder: of the cluster, with the file ``hosts`` and the folder ``local`` in it.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.own = folder / name
        """Where the host has this machine's disk, logs, and Slurm's files of it."""
        self._maker: subprocess.Popen[str] | None = None
        self._network: int | None = None
        self._first, self._processes_namespace = 0, ""

    @property
    def is_up(self) -> bool:
        """Whether it has processes."""
        return self._maker is not None and self._maker.poll() is None

    @property
    def network(self) -> str:
        """A path of the network namespace, for ``nsenter --net`` and ``ip link set ... netns``."""
        assert self._network is not None, f"{self.name} was never switched on"
        return f"/proc/{os.getpid()}/fd/{self._network}"

    def switch_on(self) -> None:
        """Begin with one process, a network stack without interfaces, and the disk as it was left."""
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
        """End all processes at once; the network stack stays and answers for them."""
        if self._maker is None:
            return
        if self._first:
            # The kernel ends all others with it. The maker goes last: it waits for the first, and reaps it.
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
        """End all processes and let go of the network stack."""
        self.kill()
        if self._network is not None:
            os.close(self._network)
            self._network = None

    def command(self, *words: str | Path) -> list[str]:
        """The words that run ``words`` on this machine, in ``/``; the exit code is theirs."""
        assert self.is_up, f"{self.name} is off"
        return ["nsenter", "--target", str(self._first), "--all", "--", *(str(word) for word in words)]

    def run(self, *words: str | Path, timeout_s: float = HANGS_S, environment: dict[str, str] | None = None) -> str:
        """Run a program to its end and return its standard output.

        Raises:
            RuntimeError: it failed; the message has its output.
        """
        return output_of(*self.command(*words), timeout_s=timeout_s, environment=environment)

    def start(self, *words: str | Path, log: Path, environment: dict[str, str] | None = None) -> None:
        """Start a daemon, a child of the first process here; both its streams are appended to ``log``."""
        # A child of nsenter would not do: nsenter stops together with it, and does not go on with it.
        with log.open("a") as stream:
            subprocess.run(
                self.command("setsid", "--fork", *words), stdin=subprocess.DEVNULL, stdout=stream,
                stderr=subprocess.STDOUT, env=environment, check=True,
            )  # fmt: skip

    def processes(self) -> list[int]:
        """The processes, by the ids that the host knows them by; not the first, which is the machine itself."""
        return [pid for pid in self._all() if pid != self._first]

    def stop(self) -> None:
        """Stop all processes, and those that they fork meanwhile, and wait until all their threads stand still."""

        def all_stand_still() -> bool:
            moving = [pid for pid in self.processes() if not _is_stopped(pid)]
            for pid in moving:
                send(pid, signal.SIGSTOP)
            return not moving

        wait_until(all_stand_still, f"all processes of {self.name} are stopped")

    def go_on(self) -> None:
        """Undo :meth:`stop`."""
        for pid in self.processes():
            send(pid, signal.SIGCONT)

    def host_pid(self, pid: int) -> int:
        """The id that the host has for the process that is ``pid`` on this machine, as ``ranks.json`` says it.

        Raises:
            ProcessLookupError: there is none.
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
    """Whether all its threads are, or have ended."""
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
        RuntimeError: it failed; the message has its output.
    """
    done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, env=environment, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def wait_until(
    holds: Callable[[], bool],
    what: str,
    why_not: Callable[[], str] = str,
    *,
    timeout_s: float = HANGS_S,
    poll_s: float = 0.05,
) -> None:
    """Wait until ``holds()``.

    Args:
        what: that is waited for, for the message.
        why_not: more for the message.

    Raises:
        TimeoutError: it did not come to hold.
    """
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:.0f} s until {what}. {why_not()}")
        time.sleep(poll_s)
