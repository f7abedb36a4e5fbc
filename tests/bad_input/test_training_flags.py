"""Flags of a training that cannot be, as every rank finds it before anything is built."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from megatron.moevement.preflight.ranges import RANGES
from moevement_core.errors import ConfigError
from tests.training import flags

FLOATS = (
    "--lr", "--min-lr", "--clip-grad", "--weight-decay", "--adam-beta1", "--adam-beta2", "--adam-eps",
    "--hidden-dropout", "--init-method-std", "--norm-epsilon", "--moe-z-loss-coeff", "--moe-input-jitter-eps",
    "--lr-warmup-init", "--lr-warmup-fraction", "--initial-loss-scale", "--moe-aux-loss-coeff",
)  # fmt: skip
COUNTS = (
    "--train-iters", "--eval-iters", "--eval-interval", "--log-interval", "--num-workers", "--save-interval",
    "--exit-interval", "--num-layers", "--hidden-size", "--seq-length", "--num-experts", "--moe-router-topk",
    "--micro-batch-size", "--global-batch-size", "--tensor-model-parallel-size", "--pipeline-model-parallel-size",
    "--expert-model-parallel-size", "--seed", "--lr-warmup-iters", "--lr-decay-iters", "--vocab-size",
    "--num-dataset-builder-threads", "--tensorboard-queue-size", "--distributed-timeout-minutes",
)  # fmt: skip
OURS = (
    "--moevement-window", "--moevement-replicas", "--moevement-peer-timeout", "--moevement-lease-seconds",
    "--moevement-order-alpha", "--moevement-reorder-threshold", "--moevement-reorder-fraction",
    "--moevement-host-memory-gb", "--moevement-log-memory-gb", "--moevement-ranks-per-node",
    "--moevement-d2h-bandwidth", "--moevement-network-bandwidth",
)  # fmt: skip


def complaint(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> str:
    """What is said of the tiny model's flags with ``words`` behind them."""
    from megatron.moevement.activate import activate

    activate()
    from megatron.training import arguments

    for name, value in (("WORLD_SIZE", "1"), ("RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["script", *flags(), *words])
    with pytest.raises(ConfigError) as raised:
        arguments.validate_args(arguments.parse_args(), {})
    (text,) = str(raised.value).splitlines()
    return text


@pytest.mark.parametrize("flag", FLOATS)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "x"])
def test_numbers_are_finite(flag: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = complaint(monkeypatch, [f"{flag}={value}"])
    assert flag in text


@pytest.mark.parametrize("flag", COUNTS)
@pytest.mark.parametrize("value", ["-5", "1.5", "nan", ""])
def test_counts_are_not_negative(flag: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = complaint(monkeypatch, [f"{flag}={value}"])
    assert flag in text


@pytest.mark.parametrize("flag", OURS)
@pytest.mark.parametrize("value", ["nan", "-1", "-inf", "x"])
def test_our_own_say_what_they_may_be(flag: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = complaint(monkeypatch, ["--moevement-sparse-ckpt", f"{flag}={value}"])
    assert flag in text


def test_every_range_is_of_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.training import arguments

    monkeypatch.setattr("sys.argv", ["script", *flags()])
    args = arguments.parse_args()
    assert not [name for name in RANGES if not hasattr(args, name)]
    assert not [name for name, its in RANGES.items() if its.holds(math.nan) or its.holds(math.inf)]


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        (["--save", "{file}", "--save-interval", "1"], "--save {file}: File exists"),
        (["--save", "{file}/deep", "--save-interval", "1"], "--save {file}/deep: Not a directory"),
        (["--save", "/proc/none", "--save-interval", "1"], "--save /proc/none: "),
        (["--save", "{long}", "--save-interval", "1"], "File name too long"),
        (["--save", "", "--save-interval", "1"], "--save '': an empty path"),
        (["--save", "{folder}/save", "--save-interval", "-1"], "--save-interval -1: needs 0 or more"),
        (["--load", "{file}"], "--load {file}: a file; needs the folder"),
        (["--load", " "], "--load ' ': an empty path"),
        (["--tensorboard-dir", "{file}"], "--tensorboard-dir {file}: File exists"),
        (["--tensorboard-dir", "/proc/none"], "--tensorboard-dir /proc/none: "),
        (["--run-dir", "{file}"], "--run-dir {file}: File exists"),
        (["--run-dir", "{long}"], "File name too long"),
        (["--data-path", "{folder}/none"], "--data-path {folder}/none: no"),
    ],
)
def test_folders_can_be_made(words: list[str], needed: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    places = {"file": tmp_path / "file", "folder": tmp_path, "long": tmp_path / ("x" * 300)}
    places["file"].touch()
    text = complaint(monkeypatch, [word.format(**places) for word in words])
    assert needed.format(**places) in text
