"""Slurm on the machines of a cluster: its configuration, and jobs by ``sbatch`` and ``scontrol``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.limits import HANGS_S

CPUS_PER_NODE = 4
"""Processors of each node in Slurm's view, whatever the host has: ranks of a small model share cores."""

# There are no cgroups (TaskPlugin, ProctrackType) and no accounting, and Slurm remembers ended jobs for a day. It looks
# at jobs every second, not every 60 s. A requeued job has to wait for cred_expire, too, by default 120 s.
_CONFIGURATION = """
ClusterName=moevement
SlurmctldHost={controller}({controller_address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldTimeout=30
SlurmdSpoolDir={folder}/%n/spool
SlurmdPidFile={folder}/%n/slurmd.pid
SlurmdTimeout={node_timeout_s}
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
MinJobAge=86400
KillWait=5
MailProg=/bin/true
SchedulerParameters=batch_sched_delay=0,sched_interval=1
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def configuration(folder: Path, controller: str, controller_address: str, nodes: dict[str, str], timeout_s: int) -> str:
    """Return the text of ``slurm.conf``.

    Args:
        nodes: address of each node by its host name.
        timeout_s: seconds of silence after which the controller takes a node for down.
    """
    return _CONFIGURATION.format(
        folder=folder, controller=controller, controller_address=controller_address, node_timeout_s=timeout_s,
        nodes="\n".join(
            f"NodeName={name} NodeAddr={address} CPUs={CPUS_PER_NODE} State=UNKNOWN" for name, address in nodes.items()
        ),
    )  # fmt: skip


ALIVE = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED")
"""States of a job that has not ended."""


class Job:
    """Batch job that was submitted.

    Args:
        commands: function that runs one of Slurm's commands and returns what it prints.
        number: id of the job.
        output: file that the job prints to.
    """

    def __init__(self, commands: Callable[..., str], number: int, output: Path) -> None:
        self._commands, self.number, self.output = commands, number, output

    def fields(self) -> dict[str, str]:
        """Return the fields of ``scontrol show job``: ``JobState``, ``ExitCode``, ``Restarts``, ``NodeList``, ..."""
        text = self._commands("scontrol", "show", "job", "--oneliner", str(self.number))
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def state(self) -> str:
        """Return the state: ``PENDING``, ``RUNNING``, ``COMPLETED``, ``FAILED``, ``CANCELLED``, ``NODE_FAIL``, ..."""
        return self.fields()["JobState"]

    def is_there(self) -> bool:
        """Return True if the job has not ended."""
        return self.state() in ALIVE

    def exit_code(self) -> int:
        """Return the exit code of the batch script."""
        return int(self.fields()["ExitCode"].split(":")[0])

    def text(self) -> str:
        """Return what the job has printed so far."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def wait(self, states: Sequence[str] = (), timeout_s: float = HANGS_S) -> str:
        """Wait until the job is in one of ``states``; return its state.

        Args:
            states: states to wait for; without any, wait for the end, whatever it is.
            timeout_s: seconds after which the job is taken to hang.

        Raises:
            TimeoutError: the time is over, or the job ended in another state; the message has the end of the output.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            state = self.state()
            ended = state not in ALIVE
            if state in states or (ended and not states):
                return state
            if ended or time.monotonic() > deadline:
                waited = f"no {' or '.join(states) or 'end'} within {timeout_s:.0f} s"
                raise TimeoutError(f"job {self.number} is {state}, {waited}; its output:\n{self.text()[-6000:]}")
            time.sleep(0.2)

    def cancel(self, *flags: str) -> None:
        """Cancel the job with ``scancel``; with ``--signal=TERM`` or the like, only send a signal."""
        self._commands("scancel", *flags, str(self.number))
