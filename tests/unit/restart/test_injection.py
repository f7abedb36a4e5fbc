"""Tests of the flags that define drills."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from moevement_core.errors import ConfigError, InjectedFault
from moevement_core.restart.faults import Fault, Flip, FlipKind, Phase, Signal, poisson_times, removals
from moevement_core.restart.injection import Injector


def test_a_fault_is_parsed() -> None:
    assert Fault.parse("rank=2,iteration=17,phase=commit,signal=STOP") == Fault(2, Phase.COMMIT, Signal.STOP, 17)
    assert Fault.parse("phase=exit,rank=0") == Fault(0, Phase.EXIT, Signal.KILL, None)


def test_a_fault_in_a_phase_that_never_came_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    happened = Fault(1, Phase.REDUCE, Signal.EXC, 3)
    missed, of_another = Fault(1, Phase.BACKWARD, Signal.KILL, 3), Fault(0, Phase.BACKWARD, Signal.KILL, 3)
    injector = Injector([happened, missed, of_another, Fault(1, Phase.SAVE, Signal.KILL, 9)])
    with pytest.raises(InjectedFault):
        injector.at(Phase.REDUCE, 3)
    assert list(injector.missed()) == [missed]


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("rank=1", r"\bphase\b(?!=)"),
        ("phase=step", r"\brank\b(?!=)"),
        ("rank=x,phase=step", r"\brank=x\b"),
        ("rank=1,phase=lunch", r"\bphase=lunch\b.*\bstart\b.*\bdecide\b"),
        ("rank=1,phase=step,signal=HUP", r"\bsignal=HUP\b.*\bKILL\b.*\bSTOP\b.*\bEXC\b"),
        ("rank=1,phase=step,when=now", r"\bwhen\b(?!=).*\bphase\b.*\bsignal\b"),
    ],
)
def test_what_is_no_fault_is_said(text: str, pattern: str) -> None:
    with pytest.raises(ConfigError, match=rf"--moevement-inject {text}\b.*{pattern}"):
        Fault.parse(text)


def test_random_kills_come_as_often_as_asked_for_and_again_with_the_same_seed() -> None:
    draws = [next(poisson_times(10.0, 8, rank, 1, life)) for life in range(400) for rank in range(8)]
    assert draws == [next(poisson_times(10.0, 8, rank, 1, life)) for life in range(400) for rank in range(8)]
    first = [min(draws[life * 8 : life * 8 + 8]) for life in range(400)]
    assert 8.5 < sum(first) / len(first) < 11.5
    assert list(islice(poisson_times(10.0, 8, 0, 2, 0), 3)) != list(islice(poisson_times(10.0, 8, 0, 1, 0), 3))


def test_a_trace_is_laid_onto_the_nodes_of_the_job(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("0,add,a\n0,add,b\n0,add,c\n60000,remove,c\n30000,remove,b\n")
    assert removals(trace, 2, 10.0) == [(3.0, 1), (6.0, 0)]
    trace.write_text("0,add\n")
    with pytest.raises(ConfigError, match=r"\btrace\.csv\b.*\bline 1\b.*'0,add'.*\bmilliseconds\b"):
        removals(trace, 2, 1.0)
    with pytest.raises(ConfigError, match=r"\bnone\.csv\b"):
        removals(tmp_path / "none.csv", 2, 1.0)


def test_a_flip_is_parsed() -> None:
    assert Flip.parse("kind=copies") == Flip(FlipKind.COPIES)
    assert Flip.parse("seed=7,kind=wire,rank=2,iteration=17") == Flip(FlipKind.WIRE, 2, 17, 7)


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("rank=1", r"\bkind\b(?!=\w).*\bcopies\b.*\bown\b"),
        ("kind=lunch", r"\bkind=lunch\b.*\bcopies\b.*\bown\b"),
        ("kind=own,rank=-1", r"\brank=-1\b"),
        ("kind=own,seed=²", r"\bseed=²"),
        ("kind=own,bit=3", r"\bbit\b(?!=).*\bkind\b.*\brank\b"),
    ],
)
def test_what_is_no_flip_is_said(text: str, pattern: str) -> None:
    with pytest.raises(ConfigError, match=rf"--moevement-inject-flip {text}\b.*{pattern}"):
        Flip.parse(text)
