"""Flags of drills, which inject failures into a job."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moevement_core.restart.faults import CorruptedPart, Corruption, Fault, Flip, FlipKind, Phase
from moevement_core.util.flags import at_least, each, flag, positive


@dataclass(frozen=True)
class DrillConfig:
    """Failures to inject into a job."""

    wipe_at: frozenset[int] = flag(
        "--moevement-wipe-at", type=int, nargs="+", default=(), metavar="N", check=each(at_least(1), frozenset),
        help="a drill: after the commit of each of these iterations, overwrite the model and optimizer memory of all "
        "ranks with NaN, recover it by replay, and compare it with the lost state",
    )  # fmt: skip
    wipe_stages: frozenset[int] | None = flag(
        "--moevement-wipe-stages", type=int, nargs="+", metavar="S",
        check=lambda name, values: frozenset(values) if values else None,
        help="with --moevement-wipe-at: overwrite memory only on these pipeline stages; they then replay alone while "
        "the other stages keep their state and wait (default: all stages)",
    )  # fmt: skip
    faults: tuple[Fault, ...] = flag(
        "--moevement-inject", action="extend", nargs="+", default=(), metavar="rank=N,phase=P[,iteration=N][,signal=S]",
        check=each(lambda name, text: Fault.parse(text), tuple),
        help=f"a drill: inject one failure into a rank in a phase ({', '.join(Phase)}); the signal is KILL, STOP, EXC "
        "(raise an exception) or WAIT (stay in the phase until another rank fails); each further argument injects one "
        "more failure",
    )  # fmt: skip
    flips: tuple[Flip, ...] = flag(
        "--moevement-inject-flip", action="extend", nargs="+", default=(),
        metavar="kind=K[,rank=N][,iteration=N][,seed=N]", check=each(lambda name, text: Flip.parse(text), tuple),
        help=f"a drill: flip one bit, once, in data of a kind ({', '.join(FlipKind)}) on a rank, after the digest of "
        "the data was made and before the data is used; see moevement drill",
    )  # fmt: skip
    corruptions: tuple[Corruption, ...] = flag(
        "--moevement-inject-corruption", action="extend", nargs="+", default=(),
        metavar="part=P,rank=N,iteration=N[,times=once|always][,seed=N]",
        check=each(lambda name, text: Corruption.parse(text), tuple),
        help=f"a drill: flip one bit, silently, in a part of an iteration ({', '.join(CorruptedPart)}) on a rank; with "
        "times=always, the rank's process flips another bit in each later iteration",
    )  # fmt: skip
    mtbf_s: float | None = flag(
        "--moevement-inject-mtbf", type=float, metavar="S", check=positive(None),
        help="a drill: kill ranks at random, one every S seconds on average",
    )  # fmt: skip
    seed: int = flag(
        "--moevement-inject-seed", type=int, default=0, metavar="N", help="seed of the random kills (default: 0)"
    )
    trace: Path | None = flag(
        "--moevement-inject-trace", metavar="FILE", check=lambda name, value: Path(value) if value else None,
        help="a drill: kill the ranks of a node when FILE removes a node; its lines are milliseconds,add|remove,NODE",
    )  # fmt: skip
    speedup: float = flag(
        "--moevement-inject-speedup", type=float, metavar="X", check=positive(1.0),
        help="with --moevement-inject-trace: run the trace X times as fast as recorded (default: 1)",
    )  # fmt: skip
