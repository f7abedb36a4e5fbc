"""Injection of faults for drills (``--moevement-inject...``): kills this rank, stops it, or makes it fail.

Megatron has its own injector (``--fault-injector-ranks`` and related flags), which fires some time after the beginning
of an iteration. A test of recovery needs faults at exact points of an iteration, and faults outside of training.
Megatron's injector offers neither.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

from moevement_core import log
from moevement_core.comms.transport import Transport
from moevement_core.errors import InjectedFault
from moevement_core.rendezvous.value_client import connect, is_first_to_claim, supervisor_address
from moevement_core.restart.faults import Fault, Phase, Signal, poisson_times, removals
from moevement_core.restart.generation import Generation, generation

_INJECTED = "injected/{}"
_BEGAN = "injected/began"
MOST_WAIT_S = 60.0
"""Longest time in seconds for which a rank with the signal WAIT stays in its phase until another rank fails."""


class Injector:
    """Injector of the faults of this process.

    Args:
        faults: faults from the flags.
        committed: returns the last iteration that this rank has committed.
    """

    def __init__(self, faults: Iterable[Fault], committed: Callable[[], int] = lambda: 0) -> None:
        self._faults = list(enumerate(faults))
        self._committed = committed
        self._injected = set[int]()
        """Numbers of the faults that this process has injected, and has survived."""

    def at(self, phase: Phase, iteration: int | None) -> None:
        """Inject the faults that are due in ``phase`` of ``iteration``; this rank may not survive the call.

        Args:
            phase: phase that this rank is in.
            iteration: iteration that this rank executes; None: the one after the last committed iteration.
        """
        if iteration is None and self._faults:
            iteration = self._committed() + 1
        for number, fault in self._faults:
            if (
                fault.phase is phase
                and fault.rank == int(os.environ.get("RANK", "-1"))
                and _is_due(fault, iteration)
                and is_first_to_claim(_INJECTED.format(number))
            ):
                self._injected.add(number)
                strike(fault, f"iteration {iteration}")

    def missed(self) -> Iterator[Fault]:
        """Yield the faults that no rank has injected. Rank 0 calls it when its training has ended.

        Other ranks may still be in the last iteration, and an evaluation or a checkpoint may follow. So faults there
        are left out. Without a supervisor the method knows only the faults of this process.
        """
        if not self._faults:
            return
        has_others = supervisor_address() is not None
        with closing(connect()) if has_others else nullcontext() as values:
            for number, fault in self._faults:
                if fault.phase in (Phase.EXIT, Phase.EVAL, Phase.SAVE) or fault.iteration == self._committed():
                    continue
                is_injected = number in self._injected or fault.rank != int(os.environ.get("RANK", "-1"))
                if values is not None:
                    is_injected = values.read(_INJECTED.format(number)) is not None
                if not is_injected:
                    yield fault


def _is_due(fault: Fault, iteration: int | None) -> bool:
    """Return True if ``fault`` is due in ``iteration``.

    A fault in the phase ``replicate`` is also due in later iterations, because an iteration may send nothing.
    """
    if fault.iteration is None or iteration is None:
        return fault.iteration is None
    return fault.iteration == iteration or (fault.phase is Phase.REPLICATE and fault.iteration < iteration)


def strike(fault: Fault, where: str) -> None:
    """Inject a fault into this process: send it a signal, raise an exception, or wait for another rank to fail.

    Args:
        fault: the fault.
        where: place of the fault, for the log.

    Raises:
        InjectedFault: the fault is an exception, or no other rank has failed in time.
    """
    log.info(f"injecting {fault.signal} into rank {fault.rank} at {fault.phase} of {where}")
    if fault.signal is Signal.EXC:
        raise InjectedFault(f"fault injected at {fault.phase} of {where}")
    if fault.signal is Signal.WAIT:
        deadline = time.monotonic() + MOST_WAIT_S
        while time.monotonic() < deadline:  # The interruption by the guard is raised in this loop.
            time.sleep(0.01)
        raise InjectedFault(f"no other rank failed while rank {fault.rank} waited at {fault.phase} of {where}")
    os.kill(os.getpid(), signal.SIGKILL if fault.signal is Signal.KILL else signal.SIGSTOP)
    time.sleep(1)  # The signal is delivered within this call.


injector = Injector(())
"""Injector of this process."""


def begin(faults: Iterable[Fault], committed: Callable[[], int]) -> None:
    """Arm ``faults`` in this process; do nothing if faults are armed already.

    Args:
        faults: faults from the flags.
        committed: returns the last iteration that this rank has committed.
    """
    global injector
    if not injector._faults:
        injector = Injector(faults, committed)


def at(phase: Phase, iteration: int | None = None) -> None:
    """Inject the faults that are due in ``phase`` of ``iteration``.

    Args:
        phase: phase that this rank is in.
        iteration: iteration that this rank executes; None: the one after the last committed iteration.
    """
    injector.at(phase, iteration)


def warn_of_missed() -> None:
    """Warn of each fault that no rank has injected, so that nobody takes the job for a passed drill.

    Rank 0 calls it when its training has ended.
    """
    for fault in injector.missed():
        when = "" if fault.iteration is None else f" of iteration {fault.iteration}"
        log.warning(
            f"a fault was not injected: rank {fault.rank} was never in the phase {fault.phase}{when}; some phases "
            "occur only in some trainers and recoveries (docs/drills.md)"
        )


def is_armed() -> bool:
    """Return True if any fault is armed in this process."""
    return bool(injector._faults)


def phases() -> frozenset[Phase]:
    """Return the phases in which faults are armed."""
    return frozenset(fault.phase for _, fault in injector._faults)


class InjectingTransport(Transport):
    """Transport in which a fault may cut off a snapshot between its header and its payload."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner

    def send(self, peer: int, tag: int, data: torch.Tensor) -> None:
        """Send a message; before a payload (more than 4096 bytes), inject the faults that are due."""
        if data.numel() > 4096:
            at(Phase.REPLICATE)
        self._inner.send(peer, tag, data)

    def receive(self, peer: int, tag: int, data: torch.Tensor) -> None:
        """Receive through the inner transport."""
        self._inner.receive(peer, tag, data)

    def pace(self, peer: int, tag: int, bytes_per_s: float) -> None:
        """Set the pace of the inner transport."""
        self._inner.pace(peer, tag, bytes_per_s)


# Faults at points in time


def start_clock(mtbf_s: float | None, seed: int, trace: Path | None, speedup: float, nodes: list[str]) -> None:
    """Schedule a kill of this rank at a random time or at the time in a trace, whichever comes first.

    Every rank calls this once in each generation.

    Args:
        mtbf_s: mean time between failures of the job, in seconds; None: no random kills.
        seed: seed of the random times.
        trace: file with failures of nodes; None: no trace.
        speedup: factor by which the trace runs faster than recorded.
        nodes: node of every rank.
    """
    now, rank = generation(), dist.get_rank()
    life = now.roster.generation if now is not None else 0
    times: list[float] = []
    """Times of kills, in seconds from now."""
    if mtbf_s is not None:
        times.append(next(poisson_times(mtbf_s, ranks=len(nodes), rank=rank, seed=seed, life=life)))
    if trace is not None:
        began = _job_began()
        names = sorted(set(nodes))
        own_index = names.index(nodes[rank])
        hits = [
            began + after - time.time() for after, node in removals(trace, len(names), speedup) if node == own_index
        ]
        times += [hit for hit in hits if hit > 0][:1]
    if times:
        name = f"moevement-inject-{life}"
        threading.Thread(target=_kill_after, args=(min(times), rank, now), name=name, daemon=True).start()


def _job_began() -> float:
    """Return the time at which the job began, in seconds since the epoch, the same in all its processes."""
    if supervisor_address() is None:
        return time.time()
    with closing(connect()) as values:
        return float(values.claim(_BEGAN, str(time.time())))


def _kill_after(seconds: float, rank: int, armed_in: Generation | None) -> None:
    time.sleep(seconds)
    if generation() is armed_in:  # A later generation has its own schedule.
        strike(Fault(rank, Phase.START, Signal.KILL), "an unknown iteration, at a random or recorded time")
