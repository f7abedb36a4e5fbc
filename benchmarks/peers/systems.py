"""Systems that the benchmark measures: the processes of a job with each of them, and remarks for the page."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers.job import RANKS

HERE = Path(__file__).parent
LOOPS = HERE / "loops"
ROOT = HERE.parents[1]
PLAIN = "none"
"""Name of the job without fault tolerance, to which the benchmark compares the others."""
RESTARTS = "100"
"""Largest number of restarts of a job; no job of the benchmark has as many."""

RESERVES = 3
"""Reserve ranks of a job with in-process restart. It cannot add processes, so it has as many kills at most."""


@dataclass(frozen=True)
class Command:
    """Process of a job, which the benchmark starts."""

    words: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    is_service: bool = False
    """True if the process does not end with the job, so the benchmark ends it."""


@dataclass(frozen=True)
class System:
    """System of fault tolerance, set up in one way."""

    name: str
    loop: str
    """File in ``loops`` with what a user writes."""
    commands: Callable[[Path, Path], tuple[Command, ...]]
    """Function that returns the processes of a job, from the folder ``bin`` of the peers' environment and the loop."""
    after_kill: str
    """Sentence for the page: what happens after the kill, and what takes the time."""
    packages: tuple[str, ...] = ()
    """Packages of the peers' environment; empty for what needs none."""
    longer: int = 1
    """Factor of the iterations of a job with kills. Above 1, survivors go on with a smaller batch, so bits must differ."""


def free_port() -> int:
    """Return a port of the loopback interface that is free at this moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def torchrun(python: Path, loop: Path, *words: str) -> tuple[str, ...]:
    """Return the words that start the ranks of a loop on this machine under torchrun."""
    options = ("--standalone", "--nproc-per-node", str(RANKS), *words)
    return (str(python), "-m", "torch.distributed.run", *options, str(loop))


def _plain(peers: Path, loop: Path) -> tuple[Command, ...]:
    return (Command(torchrun(Path(sys.executable), loop)),)


def _moevement(*flags: str) -> Callable[[Path, Path], tuple[Command, ...]]:
    def commands(peers: Path, loop: Path) -> tuple[Command, ...]:
        launcher = Path(sys.executable).with_name("moevement")
        words = ("launch", "--trainer", "torch", "--nproc", str(RANKS), "--spares", "1", str(loop))
        return (Command((str(launcher), *words, *flags)),)

    return commands


_OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Variables for torchrun, so that each restart has a new store.

In the agent's store, restarted ranks may read addresses of ended ones; gloo then fails, and torchrun restarts again.
"""


def _restarted(peers: Path, loop: Path) -> tuple[Command, ...]:
    return (Command(torchrun(peers / "python", loop, "--max-restarts", RESTARTS), _OWN_STORE),)


def _lm_resiliency(peers: Path, loop: Path) -> tuple[Command, ...]:
    (command,) = _restarted(peers, loop)
    path = f"{ROOT}{os.pathsep}{peers.parent / 'lm_resiliency'}"
    return (Command(command.words, {**command.variables, "PYTHONPATH": path}),)


def _in_process(timeouts: str) -> Callable[[Path, Path], tuple[Command, ...]]:
    """Return the processes of ranks and reserves; torchrun would end all of them after the first kill."""

    def commands(peers: Path, loop: Path) -> tuple[Command, ...]:
        words, world = (str(peers / "python"), str(loop)), RANKS + RESERVES
        variables = {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world),
            "PEERS_TIMEOUTS": timeouts,
        }  # fmt: skip
        return tuple(Command(words, {**variables, "RANK": str(rank)}) for rank in range(world))

    return commands


def _torchft(replicas: int, heartbeat_timeout_ms: int, gloo_s: int) -> Callable[[Path, Path], tuple[Command, ...]]:
    """Return the lighthouse, and torchrun for each replica group; a quorum needs so many groups."""

    def commands(peers: Path, loop: Path) -> tuple[Command, ...]:
        port = free_port()
        lighthouse = (
            str(peers / "torchft_lighthouse"), "--bind", f"127.0.0.1:{port}", "--min_replicas", str(replicas),
            "--quorum_tick_ms", "100", "--join_timeout_ms", "10000", "--heartbeat_timeout_ms", str(heartbeat_timeout_ms),
        )  # fmt: skip
        words = (
            str(peers / "python"), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1",
            "--max-restarts", RESTARTS, str(loop),
        )  # fmt: skip
        variables = {
            "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}",
            "PEERS_REPLICAS": str(replicas),
            "PEERS_GLOO_S": str(gloo_s),
        }
        groups = [Command(words, {**variables, "REPLICA_GROUP_ID": str(rank)}) for rank in range(RANKS)]
        return (Command(lighthouse, is_service=True), *groups)

    return commands


_LIVE = (
    "A spare takes over the rank and copies the whole state from a live rank; the seconds go into new process groups."
)
SYSTEMS = (
    System(PLAIN, "plain.py", _plain, "The job ends. It has to begin again."),
    System("this project, replay", "moevement.py", _moevement("--moevement-recovery", "replay"), _LIVE),
    System("this project, redo", "moevement.py", _moevement("--moevement-recovery", "redo"), _LIVE),
    System("this project, whole state each iteration", "moevement.py", _moevement("--moevement-window", "1"), _LIVE),
    System(
        "torch checkpoint, restart",
        "torch_checkpoint.py",
        _restarted,
        "torchrun ends all ranks and starts them again; most of the time, four processes import torch and libraries.",
        packages=("torch",),
    ),
    System(
        "NVRx local checkpoint, restart",
        "nvrx_local.py",
        _restarted,
        "torchrun ends all ranks and starts them again; most of the time, four processes import torch and libraries.",
        packages=("nvidia-resiliency-ext",),
    ),
    System(
        "NVRx in-process restart",
        "nvrx_in_process.py",
        _in_process("10 1"),
        "Survivors wait for gloo's timeout (10 s, as in the example of the documentation), since they cannot abort a "
        "collective of gloo. Then all ranks call the function again in their processes and load a file, and a reserve rank joins.",
        packages=("nvidia-resiliency-ext",),
    ),
    System(
        "NVRx in-process restart, short timeouts",
        "nvrx_in_process.py",
        _in_process("2 0.2"),
        "As above, but gloo's timeout is 2 s, and the wrapper looks for failures every 0.2 s instead of every second.",
        packages=("nvidia-resiliency-ext",),
    ),
    System(
        "torchft",
        "with_torchft.py",
        _torchft(1, 5000, 5),
        "The iteration is not committed. Some survivors wait for gloo's timeout (5 s, as in torchft's example), and the "
        "lighthouse as long for heartbeats of the lost group. Survivors go on with a smaller batch. torchrun starts the "
        "lost rank again; it imports torch, and copies the state from a live rank.",
        packages=("torchft-nightly",),
        longer=8,
    ),
    System(
        "torchft, short timeouts",
        "with_torchft.py",
        _torchft(1, 1000, 1),
        "As above, but both timeouts are 1 s.",
        packages=("torchft-nightly",),
        longer=8,
    ),
    System(
        "torchft, all replicas required",
        "with_torchft.py",
        _torchft(RANKS, 5000, 5),
        "Survivors wait for the restarted rank, so the batch does not shrink; most of the time, it imports torch.",
        packages=("torchft-nightly",),
    ),
    System(
        "lm-resiliency, restart",
        "with_lm_resiliency.py",
        _lm_resiliency,
        "torchrun ends all ranks, and their memory with the copies; they go on from the files. Most of the time, four "
        "processes import torch.",
        packages=("lm-resiliency",),
    ),
)


def by_name() -> dict[str, System]:
    """Return all systems by their names."""
    return {system.name: system for system in SYSTEMS}
