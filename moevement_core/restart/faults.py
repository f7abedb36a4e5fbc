"""Faults that drills inject into a job: their place and time, parsed from flags."""

from __future__ import annotations

import csv
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from moevement_core.errors import ConfigError
from moevement_core.util.numbers import NOT_NEGATIVE


class Phase(StrEnum):
    """Phase of a rank in which a fault can be injected."""

    START = "start"
    DECIDE = "decide"
    """Decision of ranks on the order of operators and the size of the next window. The fault can hit this rank after
    other ranks have completed the decision."""
    FORWARD = "forward"
    BACKWARD = "backward"
    ACCUMULATE = "accumulate"
    """Accumulation of a gradient: it is in ``param.grad``, and was not yet added to the gradient buffer."""
    READY = "ready"
    """Moment at which Megatron's overlapped gradient reduction is told that a gradient is ready."""
    FORK = "fork"
    """End of a forked random state (attention dropout): Megatron has restored the state from before the fork, but not
    the name of that state."""
    REDUCE = "reduce"
    COPY = "copy"
    """Moment at which the optimizer has copied the gradients, before any reduction that uses the copy."""
    COMMIT = "commit"
    """Moment of the commit, after every reduction and before the update."""
    STEP = "step"
    """Update of the weights, which the fault leaves incomplete."""
    GATHER = "gather"
    SNAPSHOT = "snapshot"
    REPLICATE = "replicate"
    """Sending of a snapshot to a peer."""
    EVAL = "eval"
    SAVE = "save"
    GROUPS = "groups"
    """Moment after a failure, before this rank makes process groups. The rank does not know yet from which iteration
    the job resumes, and all other ranks wait for this rank."""
    COMMUNICATORS = "communicators"
    """Moment after a failure at which process groups exist but are not used yet. The rank does not know yet from which
    iteration the job resumes."""
    RECOVER = "recover"
    """Meeting of the ranks after a failure. The iteration of the fault is the resume iteration."""
    REDO = "redo"
    """Repetition of updates from logged gradients."""
    REPLAY = "replay"
    EXIT = "exit"


class Signal(StrEnum):
    """Effect of a fault on its rank."""

    KILL = "KILL"
    STOP = "STOP"
    """SIGSTOP, after which the process hangs."""
    EXC = "EXC"
    """Exception in the rank's own code."""
    WAIT = "WAIT"
    """Wait of the rank in its phase, until the failure of another rank interrupts it."""


@dataclass(frozen=True)
class Fault:
    """Fault that is injected once in a job."""

    rank: int
    phase: Phase
    signal: Signal
    iteration: int | None = None
    """Iteration of the fault; None: the fault occurs when the rank first enters the phase."""

    @staticmethod
    def parse(text: str) -> Fault:
        """Parse the text ``rank=2,iteration=17,phase=forward,signal=KILL``; if ``signal`` is missing, it is KILL.

        Raises:
            ConfigError: the text has another form, or an unknown key or value.
        """
        flag = f"--moevement-inject {text}"
        words = _words(flag, text, ("rank", "iteration", "phase", "signal"))
        for name in ("rank", "phase"):
            if name not in words:
                raise ConfigError(f"{flag}: {name} is missing; needs rank=N,phase=P")
        for name in ("rank", "iteration"):
            if name in words and not words[name].isdecimal():
                raise ConfigError(f"{flag}: {name}={words[name]}; needs a number")
        for name, known in (("phase", Phase), ("signal", Signal)):
            if name in words and words[name] not in list(known):
                raise ConfigError(f"{flag}: {name}={words[name]}; needs one of {', '.join(known)}")
        if words["phase"] in (Phase.GROUPS, Phase.COMMUNICATORS) and "iteration" in words:
            raise ConfigError(
                f"{flag}: a rank does not know its iteration yet when it makes process groups; leave iteration= out"
            )
        iteration = int(words["iteration"]) if "iteration" in words else None
        return Fault(int(words["rank"]), Phase(words["phase"]), Signal(words.get("signal", Signal.KILL)), iteration)


class FlipKind(StrEnum):
    """Kind of data in which a drill flips a bit."""

    COPIES = "copies"
    """Bit in the copy of a snapshot in a peer's memory. A recovery reads the copy afterwards."""
    OWN = "own"
    """Bit in a rank's own snapshot. The rank reads it when it rolls back."""
    PARITY = "parity"
    """Bit in a block of parity in a peer's memory. A recovery reads the block afterwards."""
    LOGS = "logs"
    """Bit in the boundary log of a rank that sends logged tensors to a neighbour in a replay."""
    GRADIENTS = "gradients"
    """Bit in a logged gradient from which a redo repeats updates."""
    WINDOWS = "windows"
    """Bit in a file of a window on disk that the job loads afterwards."""
    WIRE = "wire"
    """Bit of a snapshot on its way to a peer."""
    HEADERS = "headers"
    """Bit in the header of a snapshot on its way to a peer."""
    MESSAGES = "messages"
    """Bit in the message that announces a snapshot to a peer."""
    FETCHES = "fetches"
    """Bit of a snapshot on its way from a peer back to its rank."""
    FEEDS = "feeds"
    """Bit of a logged tensor on its way to a stage that replays alone."""


@dataclass(frozen=True)
class Flip:
    """Flip of one bit, once in a job."""

    kind: FlipKind
    rank: int | None = None
    """Rank of the flip; None: the first rank that uses data of this kind."""
    iteration: int = 0
    """First iteration whose data may be flipped.

    For data in transfer, this is the iteration of the snapshot or tensor that is sent. For all other data, this is
    the iteration whose state the recovery is to reach.
    """
    seed: int = 0
    """Seed of the random choice of a tensor and a bit."""

    @staticmethod
    def parse(text: str) -> Flip:
        """Parse the text ``kind=copies,rank=2,iteration=17,seed=1``.

        Raises:
            ConfigError: the text has another form, or an unknown key or value.
        """
        flag = f"--moevement-inject-flip {text}"
        words = _words(flag, text, ("kind", "rank", "iteration", "seed"))
        if words.get("kind") not in list(FlipKind):
            raise ConfigError(f"{flag}: kind={words.get('kind', '')}; needs one of {', '.join(FlipKind)}")
        numbers = {name: value for name, value in words.items() if name != "kind"}
        for name, value in numbers.items():
            if not (value.isascii() and value.isdecimal()):
                raise ConfigError(f"{flag}: {name}={value}; needs a number")
        return Flip(FlipKind(words["kind"]), **{name: int(value) for name, value in numbers.items()})


class CorruptedPart(StrEnum):
    """Part of an iteration in which a drill flips a bit, without any trace of it."""

    WEIGHT = "weight"
    """Compute weight, before the forward pass."""
    MOMENT = "moment"
    """Moment of the optimizer, before the forward pass."""
    GRADIENT = "gradient"
    """Gradient of this rank, before it is reduced over ranks."""
    ACTIVATION = "activation"
    """Output of a module, in the forward pass."""


@dataclass(frozen=True)
class Corruption:
    """Flip of one bit in what a rank computes with, which no digest covers yet."""

    part: CorruptedPart
    rank: int
    iteration: int
    """First iteration whose results are wrong."""
    is_lasting: bool = False
    """True if the process of the rank flips another bit in each execution of each later iteration, as a device does
    that has become unreliable."""
    seed: int = 0
    """Seed of the random choice of a place and a bit."""

    @staticmethod
    def parse(text: str) -> Corruption:
        """Parse the text ``part=gradient,rank=2,iteration=17,times=once,seed=1``.

        Raises:
            ConfigError: the text has another form, or an unknown key or value.
        """
        flag = f"--moevement-inject-corruption {text}"
        words = _words(flag, text, ("part", "rank", "iteration", "times", "seed"))
        for name, known in (("part", list(CorruptedPart)), ("times", ["once", "always"])):
            if words.get(name, "once" if name == "times" else "") not in known:
                raise ConfigError(f"{flag}: {name}={words.get(name, '')}; needs one of {', '.join(known)}")
        for name in ("rank", "iteration", "seed"):
            if not words.get(name, "0" if name == "seed" else "").isdecimal():
                raise ConfigError(f"{flag}: {name}={words.get(name, '')}; needs a number")
        return Corruption(
            CorruptedPart(words["part"]), int(words["rank"]), int(words["iteration"]),
            is_lasting=words.get("times") == "always", seed=int(words.get("seed", "0")),
        )  # fmt: skip


def _words(flag: str, text: str, keys: Sequence[str]) -> dict[str, str]:
    """Return the values in a text like ``rank=2,iteration=17``, by key.

    Raises:
        ConfigError: the text has a key that is not in ``keys``.
    """
    words = dict(word.partition("=")[::2] for word in text.split(","))
    if unknown := words.keys() - set(keys):
        raise ConfigError(f"{flag}: unknown key {min(unknown)!r}; needs {', '.join(keys[:-1])} or {keys[-1]}")
    return words


def poisson_times(mtbf_s: float, ranks: int, rank: int, seed: int, life: int) -> Iterator[float]:
    """Yield the times at which a rank is killed, in seconds after a generation begins.

    The times are those of a Poisson process, in which the job has a failure every ``mtbf_s`` on average.

    Args:
        mtbf_s: mean seconds between failures of the job.
        ranks: number of ranks in the job.
        rank: rank that is killed.
        seed: seed; equal seeds give equal times.
        life: number of the generation. Each generation draws new times, because a Poisson process has no memory.
    """
    draws = random.Random(f"{seed}/{rank}/{life}")
    time_s = 0.0
    while True:
        time_s += draws.expovariate(1.0 / (mtbf_s * ranks))
        yield time_s


def removals(trace: Path, nodes: int, speedup: float) -> list[tuple[float, int]]:
    """Return the failures of nodes in a trace: seconds from its beginning and the number of a node, in order of time.

    Args:
        trace: file with lines of ``milliseconds,add|remove,name``.
        nodes: number of nodes in the job; the nodes of the trace are assigned to them round robin.
        speedup: factor by which the failures come faster than in the trace.

    Raises:
        ConfigError: the file is not such a trace.
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
