"""Cluster on one host: machines on a switch, real Slurm, and failures as methods.

``head`` is the switch and runs Slurm's controller; ``n1``, ``n2``, ... are nodes. Interfaces, addresses, host names and
processes are all in namespaces. So two clusters do not meet, and the host sees only a folder of each.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

import psutil

from tests.cluster import slurm
from tests.cluster.machine import Machine, output_of, send, wait_until
from tests.cluster.slurm import Job

HEAD = "head"
_PREFIX = "moevement-cluster-"
_PROGRAMS = (
    "slurmctld",
    "slurmd",
    "sbatch",
    "scontrol",
    "munged",
    "ip",
    "tc",
    "unshare",
    "nsenter",
    "setpriv",
    "setsid",
)
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def why_not() -> str | None:
    """Return why no cluster can run here; None if one can."""
    if not sys.platform.startswith("linux"):
        return "needs Linux"
    if os.geteuid() != 0:
        return "needs root, for namespaces and network interfaces"
    missing = [name for name in _PROGRAMS if shutil.which(name, path=SYSTEM_PATH) is None]
    if missing:
        return f"needs {', '.join(missing)} (apt-get install slurm-wlm munge iproute2)"
    try:
        output_of(
            "unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c",
            "ip link add name v0 type veth peer name v1 && ip link add name br0 type bridge && "
            "tc qdisc add dev v0 root tbf rate 1mbit burst 16kb latency 50ms",
        )  # fmt: skip
    except RuntimeError as error:
        return f"this kernel cannot make a cluster: {error}"
    return None


class Cluster:
    """Cluster of nodes ``n1`` to ``nN`` under one Slurm; a context manager, which leaves nothing behind.

    Args:
        nodes: number of nodes.
        node_timeout_s: seconds of silence after which Slurm takes a node for down (Slurm's default is 300).
    """

    def __init__(self, nodes: int = 3, *, node_timeout_s: int = 300) -> None:
        self._node_timeout_s = node_timeout_s
        self.names = [f"n{number}" for number in range(1, nodes + 1)]
        self.addresses = {name: f"10.77.0.{number}" for number, name in enumerate(self.names, start=1)}
        self.addresses[HEAD] = "10.77.0.254"
        self.machines: dict[str, Machine] = {}
        self.folder = Path()
        """Folder of all files of the cluster, with the same path on all machines and on the host."""
        self._lock = -1
        self._jobs: list[Job] = []
        self._is_hurt = False
        self._booted: dict[str, float] = {}

    def __enter__(self) -> Cluster:
        self.switch_on()
        return self

    def __exit__(self, *_: object) -> None:
        self.switch_off()

    @property
    def local(self) -> Path:
        """Path of a node's own disk. Each node has another disk there; its files outlive the node's processes."""
        return self.folder / "local"

    def switch_on(self) -> None:
        """Boot all machines and wait until Slurm has registered all nodes."""
        _remove_leftovers()
        self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._lock = os.open(self.folder, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)  # held while this process lives: an unlocked folder is a leftover
        atexit.register(self.switch_off)
        try:
            self.local.mkdir()
            hosts = "".join(f"{address} {name}\n" for name, address in self.addresses.items())
            (self.folder / "hosts").write_text("127.0.0.1 localhost\n" + hosts)
            nodes = {name: self.addresses[name] for name in self.names}
            (self.folder / "slurm.conf").write_text(
                slurm.configuration(self.folder, HEAD, self.addresses[HEAD], nodes, self._node_timeout_s)
            )
            self.machines = {name: Machine(name, self.folder) for name in (HEAD, *self.names)}
            self._boot()
        except BaseException:
            self.switch_off()
            raise

    def switch_off(self) -> None:
        """End all machines and remove the folder."""
        atexit.unregister(self.switch_off)
        for machine in self.machines.values():
            machine.switch_off()
        self.machines.clear()
        self._jobs.clear()
        if self._lock >= 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1

    def restore(self) -> None:
        """Boot all machines again, with empty disks and without jobs, if a test broke something or left a job."""
        if self._is_hurt or any(job.is_there() for job in self._jobs):
            for machine in self.machines.values():
                machine.switch_off()
            self._boot()

    # Jobs

    def submit(
        self,
        script: Path,
        args: Sequence[str] = (),
        environment: dict[str, str] | None = None,
        *flags: str,
        nodes: int,
        tasks_per_node: int,
        output: Path,
        folder: Path,
    ) -> Job:
        """Submit a batch script with ``sbatch``; return its job.

        Args:
            environment: variables of the shell that submits, beyond PATH and HOME.
            flags: flags of ``sbatch``, like ``--requeue``.
            output: file for what the job prints.
            folder: working directory of the job.
        """
        number = self.slurm(
            "sbatch", "--parsable", f"--chdir={folder}", f"--output={output}", f"--nodes={nodes}",
            f"--ntasks-per-node={tasks_per_node}", "--cpus-per-task=1", "--gpus-per-node=0", *flags, str(script), *args,
            environment=environment,
        )  # fmt: skip
        job = Job(self.slurm, int(number), output)
        self._jobs.append(job)
        return job

    def slurm(self, *words: str, environment: dict[str, str] | None = None) -> str:
        """Run one of Slurm's commands and return what it prints."""
        return self.machines[HEAD].run(*words, environment={**self._environment(), **(environment or {})})

    def states(self) -> dict[str, str]:
        """Return Slurm's state of each node: ``idle``, ``allocated``, ``mixed``, ``down``, ``completing``, ..."""
        lines = self.slurm("sinfo", "--noheader", "--Node", "--format=%N %T").splitlines()
        return dict(line.split() for line in lines)

    # Failures; each method returns the time at which the failure was complete, in seconds since the epoch

    def kill_node(self, name: str) -> float:
        """End all processes of a node at once; its kernel resets their connections."""
        self._is_hurt = True
        self.machines[name].kill()
        return time.time()

    def lose_power(self, name: str) -> float:
        """End a node in silence. Its link stays cut, because a kernel without processes would answer with resets."""
        at = self.cut_link(name)
        self.kill_node(name)
        return at

    def cut_link(self, name: str) -> float:
        """Cut a node off from all others; no connection is reset, and no interface goes down."""
        self._is_hurt = True
        self._on_switch("ip", "link", "set", name, "nomaster")
        return time.time()

    def mend_link(self, name: str) -> float:
        """Connect a node again after :meth:`cut_link`."""
        self._on_switch("ip", "link", "set", name, "master", "switch")
        return time.time()

    def slow_link(self, name: str, mbit_per_s: float | None) -> float:
        """Limit the rate of a node's link in both directions; None removes the limit."""
        self._is_hurt = True
        for on, device in ((self._on_switch, name), (self._on_node(name), "eth0")):
            with contextlib.suppress(RuntimeError):  # it has no limit yet
                on("tc", "qdisc", "del", "dev", device, "root")
            if mbit_per_s is not None:
                # A bucket of 10 ms, which a kernel with 100 ticks a second can empty in time.
                burst = max(16_000, int(mbit_per_s * 1e6 / 8 / 100))
                on(
                    "tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", f"{int(mbit_per_s * 1e6)}bit",
                    "burst", str(burst), "latency", "100ms",
                )  # fmt: skip
        return time.time()

    def add_interfaces(self) -> None:
        """Give every node a second interface, eth1, on a second switch; a node that boots again loses it."""
        self._is_hurt = True
        self._on_switch("ip", "link", "add", "name", "switch1", "address", "02:00:0a:4e:00:fe", "type", "bridge")
        self._on_switch("ip", "link", "set", "switch1", "up")
        for number, name in enumerate(self.names, start=1):
            network = self.machines[name].network
            self._on_switch(
                "ip", "link", "add", "name", f"{name}x", "type", "veth", "peer", "name", "eth1", "netns", network
            )
            self._on_switch("ip", "link", "set", f"{name}x", "up", "master", "switch1")
            self._on_node(name)("ip", "address", "add", f"10.78.0.{number}/24", "dev", "eth1")
            self._on_node(name)("ip", "link", "set", "eth1", "up")

    def sent_bytes(self, name: str, interface: str) -> int:
        """Return the number of bytes that a node has sent over an interface."""
        (link,) = json.loads(self._on_node(name)("ip", "-statistics", "-json", "link", "show", "dev", interface))
        return int(link["stats64"]["tx"]["bytes"])

    def freeze_node(self, name: str) -> float:
        """Stop all processes of a node; its kernel still acknowledges what they receive."""
        self._is_hurt = True
        self.machines[name].stop()
        return time.time()

    def thaw_node(self, name: str) -> float:
        """Resume the processes of a node after :meth:`freeze_node`."""
        self.machines[name].go_on()
        return time.time()

    def kill_task(self, name: str, index: int, *, alone: bool = False) -> float:
        """End the ``index``-th task that ``srun`` started on a node, and all that the task started.

        Args:
            alone: True to end only the task itself. Its children then get another parent, so Slurm loses sight of them;
                with cgroups it would not.
        """
        task = self.task(name, index)
        for process in [task, *([] if alone else task.children(recursive=True))]:
            send(process.pid, signal.SIGKILL)
        return time.time()

    def kill_process(self, name: str, pid: int, number: signal.Signals = signal.SIGKILL) -> float:
        """Send a signal to the process that has the id ``pid`` on a node."""
        send(self.machines[name].host_pid(pid), number)
        return time.time()

    def take_down(self, name: str) -> None:
        """Report a node to Slurm as lost at once, instead of after ``node_timeout_s``."""
        self.slurm("scontrol", "update", f"NodeName={name}", "State=DOWN", "Reason=lost")

    def restart_node(self, name: str) -> None:
        """Boot a node from any state; it gets a new network stack, a whole link and Slurm, and keeps its disk."""
        self._boot_node(name)
        self._wait_for(name)

    def task(self, name: str, index: int) -> psutil.Process:
        """Return the ``index``-th task that ``srun`` started on a node."""
        for pid in self.machines[name].processes():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                environment, parent = process.environ(), process.parent()
                if parent is None or parent.name() != "slurmstepd":
                    continue
                # The batch script is a child of a slurmstepd, too, but belongs to no step.
                if environment.get("SLURM_LOCALID") == str(index) and "SLURM_STEP_ID" in environment:
                    return process
        raise ProcessLookupError(f"{name} has no task {index}")

    # Booting

    def _boot(self) -> None:
        state = self.folder / "state"
        shutil.rmtree(state, ignore_errors=True)
        state.mkdir()
        for name in self.names:
            shutil.rmtree(self.folder / name / "disk", ignore_errors=True)
        self._jobs.clear()
        head = self.machines[HEAD]
        head.switch_on()
        # A fixed address: otherwise a bridge takes the lowest of its ports, and changes it when a port is cut off.
        self._on_switch("ip", "link", "add", "name", "switch", "address", "02:00:0a:4d:00:fe", "type", "bridge")
        self._on_switch("ip", "address", "add", f"{self.addresses[HEAD]}/24", "dev", "switch")
        self._on_switch("ip", "link", "set", "switch", "up")
        munge = self.folder / "munge"
        key, socket = munge.with_suffix(".key"), munge.with_suffix(".socket")
        key.write_bytes(os.urandom(64))
        key.chmod(0o600)
        socket.unlink(missing_ok=True)
        head.start(
            "munged", "--foreground", "--force", f"--socket={socket}", f"--key-file={key}",
            f"--pid-file={munge.with_suffix('.pid')}", f"--seed-file={munge.with_suffix('.seed')}",
            log=head.own / "munged.log", environment=self._environment(),
        )  # fmt: skip
        wait_until(socket.exists, "munged listens", lambda: (head.own / "munged.log").read_text())
        head.start("slurmctld", "-D", log=head.own / "slurmctld.log", environment=self._environment())
        for name in self.names:
            self._boot_node(name)
        for name in self.names:
            self._wait_for(name)
        self._is_hurt = False

    def _boot_node(self, name: str) -> None:
        machine = self.machines[name]
        machine.switch_off()
        self._booted[name] = time.time()
        with contextlib.suppress(RuntimeError):  # it ends with the node's old network stack, but not at once
            self._on_switch("ip", "link", "del", name)
        machine.switch_on()
        self._on_switch(
            "ip", "link", "add", "name", name, "type", "veth", "peer", "name", "eth0", "netns", machine.network
        )
        self._on_switch("ip", "link", "set", name, "up", "master", "switch")
        on_node = self._on_node(name)
        on_node("ip", "address", "add", f"{self.addresses[name]}/24", "dev", "eth0")
        on_node("ip", "link", "set", "eth0", "up")
        machine.start("slurmd", "-D", log=machine.own / "slurmd.log", environment=self._environment())

    def _wait_for(self, name: str) -> None:
        wait_until(
            lambda: self._registered(name) >= int(self._booted[name]), f"Slurm has {name}",
            lambda: f"Its daemons:\n{self._daemons(name)}",
        )  # fmt: skip

    def _registered(self, name: str) -> float:
        """Return the time at which the node's daemon started, as the controller knows it.

        The node's state would not do, because the controller may still have the state from before the boot.
        """
        try:
            text = self.slurm("scontrol", "show", "node", "--oneliner", name)
        except RuntimeError:  # the controller is not up yet
            return 0
        began = next((word.split("=")[1] for word in text.split() if word.startswith("SlurmdStartTime=")), "None")
        return 0 if began == "None" else datetime.fromisoformat(began).timestamp()

    def _daemons(self, name: str) -> str:
        logs = (self.machines[HEAD].own / "slurmctld.log", self.machines[name].own / "slurmd.log")
        return "\n".join(log.read_text()[-2000:] for log in logs if log.exists())

    def _environment(self) -> dict[str, str]:
        # Jobs get only these variables, and not the environment of the tests.
        return {"PATH": SYSTEM_PATH, "HOME": str(Path.home()), "SLURM_CONF": str(self.folder / "slurm.conf")}

    def _on_switch(self, *words: str) -> str:
        return output_of("nsenter", f"--net={self.machines[HEAD].network}", *words)

    def _on_node(self, name: str) -> Callable[..., str]:
        """Return a function that runs commands in the network stack of a node, even if the node has no processes."""
        return lambda *words: output_of("nsenter", f"--net={self.machines[name].network}", *words)


def _remove_leftovers() -> None:
    """Remove folders of clusters whose process ended without removing them; their machines ended with it."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
