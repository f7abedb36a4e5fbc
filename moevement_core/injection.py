"""Faults that are injected for drills: where and when, parsed from flags."""

from __future__ import annotations

import csv
import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from moevement_core.errors import ConfigError
from moevement_core.numbers import NOT_NEGATIVE


class Phase(StrEnum):
    """Phases of an iteration, or beside it."""

    START = "start"
    DECIDE = "decide"
    """Decision at a window's beginning; other ranks may have completed it."""
    FORWARD = "forward"
    BACKWARD = "backward"
    ACCUMULATE = "accumulate"
    """A gradient stands in ``param.grad`` and is not in its buffer yet."""
    READY = "ready"
    """Gradients whose reduction overlaps are being counted."""
    FORK = "fork"
    """Exit of another random state (attention dropout): it is restored, and its name is not yet."""
    REDUCE = "reduce"
    COPY = "copy"
    """The optimizer has its copy of the gradients; nothing has been reduced with it."""
    COMMIT = "commit"
    """Moment after every reduction and before the update."""
    STEP = "step"
    """Update, which is then torn."""
    GATHER = "gather"
    SNAPSHOT = "snapshot"
    REPLICATE = "replicate"
    """Sending of a snapshot to a peer."""
    EVAL = "eval"
    SAVE = "save"
    GROUPS = "groups"
    """Moment after a failure, before process groups are made: the others wait for this rank. It
    knows no iteration yet.
    """
    COMMUNICATORS = "communicators"
    """Moment after a failure, when process groups are made and not used yet. It knows no iteration yet."""
    RECOVER = "recover"
    """Meeting of the ranks after a failure; the iteration is the one that they resume."""
    REDO = "redo"
    """Redo of updates."""
    REPLAY = "replay"
    EXIT = "exit"


class Signal(StrEnum):
    """Effects on the rank."""

    KILL = "KILL"
    STOP = "STOP"
    """Stop of the process, which then hangs."""
    EXC = "EXC"
    """Exception raised by the rank."""
    WAIT = "WAIT"
    """Wait of the rank until the failure of another one interrupts it."""


@dataclass(frozen=True)
class Fault:
    """Fault that happens once in a job."""

    rank: int
    phase: Phase
    signal: Signal
    iteration: int | None = None
    """Iteration of the fault; None: the first time that the rank is in the phase."""

    @staticmethod
    def parse(text: str) -> Fault:
        """Parse ``rank=2,iteration=17,phase=forward,signal=KILL``; ``signal`` is KILL if it is left out.

        Raises:
            ConfigError: it says something else.
        """
        flag = f"--moevement-inject {text}"
        words = dict(word.partition("=")[::2] for word in text.split(","))
        if unknown := words.keys() - {"rank", "iteration", "phase", "signal"}:
            raise ConfigError(f"{flag}: {sorted(unknown)[0]!r} is none of rank, iteration, phase, signal")
        for name in ("rank", "phase"):
            if name not in words:
                raise ConfigError(f"{flag}: needs rank=N,phase=P; {name} is missing")
        for name in ("rank", "iteration"):
            if name in words and not words[name].isdecimal():
                raise ConfigError(f"{flag}: {name}={words[name]}; needs a number")
        for name, known in (("phase", Phase), ("signal", Signal)):
            if name in words and words[name] not in list(known):
                raise ConfigError(f"{flag}: {name}={words[name]}; needs one of {', '.join(known)}")
        if words["phase"] in (Phase.GROUPS, Phase.COMMUNICATORS) and "iteration" in words:
            raise ConfigError(f"{flag}: a rank that makes process groups knows no iteration yet; leave iteration= out")
        iteration = int(words["iteration"]) if "iteration" in words else None
        return Fault(int(words["rank"]), Phase(words["phase"]), Signal(words.get("signal", Signal.KILL)), iteration)


class FlipKind(StrEnum):
    """Data of which a drill flips a bit."""

    COPIES = "copies"
    """A copy of a snapshot in a peer's memory, that a recovery reads."""
    OWN = "own"
    """A snapshot of its own that a rank which rolls back reads."""
    PARITY = "parity"
    """A block of parity that a recovery reads."""
    LOGS = "logs"
    """Tensors that a rank sent over its stage's boundary, and is to feed again."""
    GRADIENTS = "gradients"
    """A logged gradient that updates are made again from."""
    WINDOWS = "windows"
    """A file of a window on disk that is loaded."""
    WIRE = "wire"
    """A snapshot on its way to a peer."""
    HEADERS = "headers"
    """Header of a snapshot on its way there."""
    MESSAGES = "messages"
    """The message that announces it, on its way there."""
    FETCHES = "fetches"
    """A snapshot on its way back to the rank that it is of."""
    FEEDS = "feeds"
    """A tensor on its way to a stage that replays alone."""


@dataclass(frozen=True)
class Flip:
    """A bit that is flipped, once in a job."""

    kind: FlipKind
    rank: int | None = None
    """Rank of the flip; None: the first that has such data in use."""
    iteration: int = 0
    """First iteration whose data is flipped: sent on the wire, or, for other data, recovered."""
    seed: int = 0
    """Draws which tensor and which bit."""

    @staticmethod
    def parse(text: str) -> Flip:
        """Parse ``kind=copies,rank=2,iteration=17,seed=1``.

        Raises:
            ConfigError: it says something else.
        """
        flag = f"--moevement-inject-flip {text}"
        words = dict(word.partition("=")[::2] for word in text.split(","))
        if unknown := words.keys() - {"kind", "rank", "iteration", "seed"}:
            raise ConfigError(f"{flag}: {sorted(unknown)[0]!r} is none of kind, rank, iteration, seed")
        if words.get("kind") not in list(FlipKind):
            raise ConfigError(f"{flag}: kind={words.get('kind', '')}; needs one of {', '.join(FlipKind)}")
        numbers = {name: value for name, value in words.items() if name != "kind"}
        for name, value in numbers.items():
            if not (value.isascii() and value.isdecimal()):
                raise ConfigError(f"{flag}: {name}={value}; needs a number")
        return Flip(FlipKind(words["kind"]), **{name: int(value) for name, value in numbers.items()})


def poisson_times(mtbf_s: float, ranks: int, rank: int, seed: int, life: int) -> Iterator[float]:
    """Yield the times at which a rank is killed, in seconds after it began, so that the job sees a failure every
    ``mtbf_s`` on average.

    Args:
        mtbf_s: mean time between failures of the job.
        ranks: of the job.
        rank: which.
        seed: equal seeds give equal times.
        life: how often the job has been formed; processes have no memory, so every one has times of its own.
    """
    draws = random.Random(f"{seed}/{rank}/{life}")
    at = 0.0
    while True:
        at += draws.expovariate(1.0 / (mtbf_s * ranks))
        yield at


def removals(trace: Path, nodes: int, speedup: float) -> list[tuple[float, int]]:
    """Return when nodes of a job fail by a trace, in seconds after its beginning, and which nodes.

    Args:
        trace: lines of ``milliseconds,add|remove,name``.
        nodes: of the job, onto which those of the trace are laid by turns.
        speedup: how much faster than in the trace.

    Raises:
        ConfigError: it is no trace.
    """
    failures, places = [], dict[str, int]()
    try:
        with trace.open(newline="") as file:
            for number, row in enumerate(csv.reader(file), start=1):
                if len(row) != 3 or row[1] not in ("add", "remove"):
                    raise ConfigError(
                        f"trace {trace}, line {number}: {','.join(row)[:60]!r}; needs "
                        "milliseconds,add,NODE or milliseconds,remove,NODE"
                    )
                node = places.setdefault(row[2], len(places)) % nodes
                NOT_NEGATIVE.check(f"trace {trace}, line {number}: milliseconds", float(row[0]))
                if row[1] == "remove":
                    failures.append((float(row[0]) / 1e3 / speedup, node))
    except (OSError, ValueError) as error:
        raise ConfigError(f"trace {trace}: {error}") from None
    return sorted(failures)
