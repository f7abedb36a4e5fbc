"""Idle spans of the network in an iteration, from samples of some iterations."""

from __future__ import annotations

import math
from random import Random

import pytest

from moevement_core.policy.idle import FILLED, IdleSpans, TrafficSample, idle_spans


def _iteration(random: Random, length_s: float, busy: list[tuple[float, float]]) -> tuple[float, list[TrafficSample]]:
    """Return an iteration's length and samples: 1 GB/s while training communicates, and a little at other times."""
    samples, at = [], 0.0
    while at < length_s:
        step = random.uniform(0.001, 0.003)
        inside = sum(max(0.0, min(at + step, end) - max(at, begin)) for begin, end in busy)
        samples.append(TrafficSample(at + step, step, int(1e9 * inside + random.randrange(2000))))
        at += step
    return length_s, samples


def test_spans_are_where_training_is_silent() -> None:
    seed = Random().randrange(1 << 32)
    print(f"seed {seed}")
    random, busy = Random(seed), [(0.1, 0.2), (0.55, 0.6), (0.9, 1.0)]
    idle = idle_spans([_iteration(random, 1.0, busy) for _ in range(8)])
    assert idle.iteration_s == 1.0
    assert idle.idle_s == pytest.approx(0.75, abs=0.05), seed
    for begin, end in idle.spans:
        assert all(end <= span[0] + 0.011 or begin >= span[1] - 0.011 for span in busy), (seed, idle)


def test_what_was_busy_once_is_idle_and_what_often_was_is_not() -> None:
    random = Random(3)
    once = [_iteration(random, 1.0, [(0.5, 0.6)]), *(_iteration(random, 1.0, [(0.0, 0.05)]) for _ in range(7))]
    assert idle_spans(once).wait_s(0.55) == 0
    often = [_iteration(random, 1.0, [(0.5, 0.6)]) for _ in range(4)]
    often += [_iteration(random, 1.0, [(0.0, 0.05)]) for _ in range(4)]
    assert idle_spans(often).wait_s(0.55) == pytest.approx(0.05, abs=0.02)


def test_waits_and_what_is_left() -> None:
    spans = IdleSpans(1.0, ((0.2, 0.4), (0.7, 0.9)))
    assert [round(spans.wait_s(at), 3) for at in (0.0, 0.2, 0.3, 0.5, 0.95, 1.2)] == [0.2, 0, 0, 0.2, 0.05, 0]
    assert spans.left_s(0.3) == pytest.approx(FILLED * 0.1)
    assert spans.left_s(1.1) == math.inf


def test_where_nothing_is_known_all_is_idle() -> None:
    for spans in (IdleSpans(), idle_spans([]), idle_spans([(1.0, [])])):
        assert (spans.wait_s(0.3), spans.left_s(0.3) > 1e9) == (0.0, True)
