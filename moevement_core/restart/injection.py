"""Injected faults, for drills (``--moevement-inject...``): this rank is killed, stopped, or made to fail.

Megatron has an injector of its own (``--fault-injector-ranks`` and its relatives), which fires a while after an
iteration has begun. It cannot say at which point of the iteration, nor anything outside of training, which is what a
recovery must be tried with.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist

from moevement_core import log
from moevement_core.errors import InjectedFault
from moevement_core.injection import Fault, Phase, Signal, poisson_times, removals
from moevement_core.replication.transport import Transport
from moevement_core.restart.generation import Generation, generation
from moevement_core.restart.store import connect, store_address

_INJECTED = "injected/{}"
_BEGAN = "injected/began"
MOST_WAIT_S = 60.0
"""Most seconds that a rank stays where it is for another one to fail."""


class Injector:
    """The faults of this process.

    Args:
        faults: from the flags.
        committed: gives the last iteration that this rank has committed.
    """

    def __init__(self, faults: Iterable[Fault], committed: Callable[[], int] = lambda: 0) -> None:
        self._faults = list(enumerate(faults))
        self._committed = committed
        address = store_address()
        self._store = connect(address) if address is not None and self._faults else None

    def at(self, phase: Phase, iteration: int | None) -> None:
        """This rank is in ``phase`` of ``iteration``; maybe for the last time."""
        if iteration is None and self._faults:
            iteration = self._committed() + 1
        for number, fault in self._faults:
            if (
                fault.phase is phase
                and fault.rank == int(os.environ.get("RANK", "-1"))
                and _is_due(fault, iteration)
                and self._is_first(number)
            ):
                strike(fault, f"iteration {iteration}")

    def _is_first(self, number: int) -> bool:
        """Claim the fault for this process; return False if it has happened to an earlier process with the rank."""
        mine = f"{socket.gethostname()} {os.getpid()} {secrets.token_hex(8)}"
        return self._store is None or self._store.claim(_INJECTED.format(number), mine) == mine


def _is_due(fault: Fault, iteration: int | None) -> bool:
    """Return whether ``fault`` happens in ``iteration``; one of sending in the first in which something is sent."""
    if fault.iteration is None or iteration is None:
        return fault.iteration is None
    return fault.iteration == iteration or (fault.phase is Phase.REPLICATE and fault.iteration < iteration)


def strike(fault: Fault, where: str) -> None:
    """Let it happen, to this process.

    Raises:
        InjectedFault: if that is how.
    """
    log.info(f"injecting {fault.signal} into rank {fault.rank} at {fault.phase} of {where}")
    if fault.signal is Signal.EXC:
        raise InjectedFault(f"injected at {fault.phase} of {where}")
    if fault.signal is Signal.WAIT:
        deadline = time.monotonic() + MOST_WAIT_S
        while time.monotonic() < deadline:  # the restart's exception is raised in here
            time.sleep(0.01)
        raise InjectedFault(f"nobody failed while rank {fault.rank} stayed at {fault.phase} of {where}")
    os.kill(os.getpid(), signal.SIGKILL if fault.signal is Signal.KILL else signal.SIGSTOP)
    time.sleep(1)  # until it is delivered


injector = Injector(())
"""The one of this process."""


def begin(faults: Iterable[Fault], committed: Callable[[], int]) -> None:
    """Have ``faults`` happen from now on; does nothing if they are there already.

    Args:
        faults: from the flags.
        committed: gives the last iteration that this rank has committed.
    """
    global injector
    if not injector._faults:
        injector = Injector(faults, committed)


def at(phase: Phase, iteration: int | None = None) -> None:
    """This rank is in ``phase``; of the iteration that is under way if none is given."""
    injector.at(phase, iteration)


def is_armed() -> bool:
    """Return whether any fault is to happen in this process."""
    return bool(injector._faults)


def phases() -> frozenset[Phase]:
    """Return the phases in which a fault is to happen."""
    return frozenset(fault.phase for _, fault in injector._faults)


class InjectingTransport(Transport):
    """Snapshots on their way, which a fault may cut off between header and payload."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner

    def send(self, peer: int, tag: int, data: torch.Tensor) -> None:
        """Send the first half; then, maybe, nothing more."""
        if data.numel() > 4096:
            at(Phase.REPLICATE)
        self._inner.send(peer, tag, data)

    def receive(self, peer: int, tag: int, data: torch.Tensor) -> None:
        """Receive as the inner transport does."""
        self._inner.receive(peer, tag, data)

    def pace(self, peer: int, tag: int, bytes_per_s: float) -> None:
        """Pace as the inner transport does."""
        self._inner.pace(peer, tag, bytes_per_s)


# By the clock


def start_clock(mtbf_s: float | None, seed: int, trace: Path | None, speedup: float, nodes: list[str]) -> None:
    """Kill this rank at the times that are drawn or recorded; every rank calls it once in each generation.

    Args:
        mtbf_s: mean time between failures of the job; None: no failures are drawn.
        seed: of the draws.
        trace: failures of nodes; None: no trace.
        speedup: of the trace.
        nodes: the node of every rank.
    """
    now, rank = generation(), dist.get_rank()
    life = now.roster.generation if now is not None else 0
    times: list[float] = []
    """Seconds from now."""
    if mtbf_s is not None:
        times.append(next(poisson_times(mtbf_s, len(nodes), rank, seed, life)))
    if trace is not None:
        began = _job_began()
        names = sorted(set(nodes))
        mine = names.index(nodes[rank])
        hits = [began + after - time.time() for after, node in removals(trace, len(names), speedup) if node == mine]
        times += [hit for hit in hits if hit > 0][:1]
    if times:
        name = f"moevement-inject-{life}"
        threading.Thread(target=_kill_after, args=(min(times), rank, now), name=name, daemon=True).start()


def _job_began() -> float:
    """Seconds since the epoch, the same for every process there will ever be."""
    address = store_address()
    if address is None:
        return time.time()
    return float(connect(address).claim(_BEGAN, str(time.time())))


def _kill_after(seconds: float, rank: int, its_generation: Generation | None) -> None:
    time.sleep(seconds)
    if generation() is its_generation:  # else another one has its own
        strike(Fault(rank, Phase.START, Signal.KILL), "what it does now")
