"""Every flag of Megatron with a range in this project takes the values of the range; others are refused by name."""

from __future__ import annotations

import argparse
import math
from argparse import Namespace

import pytest

from megatron.moevement.preflight.ranges import RANGES, ranges
from moevement_core.util.numbers import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE, SHARE, Range
from tests.bad_input.command import unnamed
from tests.unit.range_edges import BELOW_ONE, NO_NUMBER, NO_WHOLE_NUMBER, edges

FLAGS: dict[Range, str] = {
    NOT_NEGATIVE: """
        --train-iters --train-samples --eval-iters --eval-interval --save-interval --exit-interval
        --exit-duration-in-mins --ckpt-step --non-persistent-save-interval --save-retain-interval --manual-gc-interval
        --tensorboard-log-interval --check-weight-hash-across-dp-replicas-interval --train-sync-interval
        --moe-z-loss-coeff --moe-input-jitter-eps --rampup-batch-size --lr --min-lr --decoupled-lr --decoupled-min-lr
        --lr-warmup-init --lr-warmup-iters --lr-warmup-samples --lr-wsd-decay-iters --lr-wsd-decay-samples
        --weight-decay --start-weight-decay --end-weight-decay --clip-grad --sgd-momentum --init-method-std
        --num-workers
    """,
    AT_LEAST_ONE: """
        --log-interval --tensorboard-queue-size --num-layers --hidden-size --num-attention-heads --num-query-groups
        --kv-channels --ffn-hidden-size --seq-length --max-position-embeddings --vocab-size
        --make-vocab-size-divisible-by --mtp-num-layers --num-experts --moe-router-topk --moe-ffn-hidden-size
        --moe-shared-expert-intermediate-size --moe-router-num-groups --moe-router-group-topk --micro-batch-size
        --global-batch-size --tensor-model-parallel-size --pipeline-model-parallel-size --context-parallel-size
        --expert-model-parallel-size --expert-tensor-parallel-size --num-distributed-optimizer-instances
        --distributed-timeout-minutes --lr-decay-iters --lr-decay-samples --rotary-base --loss-scale-window
        --hysteresis --num-dataset-builder-threads --seed --dist-ckpt-workers
    """,
    POSITIVE: """
        --adam-eps --norm-epsilon --loss-scale --initial-loss-scale --min-loss-scale --inprocess-soft-timeout
        --inprocess-hard-timeout --inprocess-monitor-thread-interval
    """,
    SHARE: "--lr-warmup-fraction --hidden-dropout --attention-dropout --rotary-percent",
    BELOW_ONE: "--adam-beta1 --adam-beta2",
    Range(0, 2): "--timing-log-level",
}
EXPECTED = {flag: bounds for bounds, flags in FLAGS.items() for flag in flags.split()}
FINITE = ("--moe-aux-loss-coeff",)
"""Flags without a range, whose values may be negative but must be finite."""


@pytest.fixture(scope="module")
def actions() -> dict[str, argparse.Action]:
    """Return the actions of Megatron's parser by flag."""
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    add_megatron_arguments(parser)
    return {option: action for action in parser._actions for option in action.option_strings}


def complaint(dest: str, value: object) -> str | None:
    """Return the message that refuses a parsed value, or None if it is accepted."""
    return next(ranges(Namespace(**{dest: value})), None)


def test_every_range_is_of_a_flag(actions: dict[str, argparse.Action]) -> None:
    assert {actions[flag].dest for flag in EXPECTED} == set(RANGES)


@pytest.mark.parametrize("flag", EXPECTED)
def test_a_flag_takes_its_range_and_no_more(flag: str, actions: dict[str, argparse.Action]) -> None:
    action, bounds = actions[flag], EXPECTED[flag]
    is_whole = action.type is int
    tried = edges(bounds, is_whole=is_whole)
    for value in tried.inside:
        assert complaint(action.dest, value) is None, value
        assert complaint(action.dest, [value, value]) is None, value
    for value in tried.outside:
        for parsed in (value, [tried.inside[0], value]):
            text = complaint(action.dest, parsed)
            assert text is not None, parsed
            assert not unnamed(text, [flag, value, bounds.least]), text


@pytest.mark.parametrize("flag", [*EXPECTED, *FINITE])
def test_what_is_no_number_is_refused_by_the_parser(flag: str, actions: dict[str, argparse.Action]) -> None:
    kind = actions[flag].type
    assert callable(kind)
    for word in NO_WHOLE_NUMBER if kind is int else NO_NUMBER:
        with pytest.raises((ValueError, argparse.ArgumentTypeError)):
            kind(word)


@pytest.mark.parametrize("flag", FINITE)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_without_a_range_is_finite(flag: str, value: float, actions: dict[str, argparse.Action]) -> None:
    for parsed in (value, [0.5, value]):
        text = complaint(actions[flag].dest, parsed)
        assert text is not None
        assert not unnamed(text, [flag, value]), text
    assert complaint(actions[flag].dest, [-1.0, 0.5]) is None


def test_what_is_no_number_has_no_range() -> None:
    assert not list(ranges(Namespace(num_layers=None, seed=True, lr="0.1", moevement_peer_timeout=math.inf)))
