"""Invalid flags of a training job, which every rank refuses before it builds anything.

There are a few values of each kind. tests/unit/megatron/test_preflight_ranges.py (Megatron's) and
tests/unit/trainer/test_config_ranges.py (ours) try every flag that has a range.
"""

from __future__ import annotations

import errno
import math
from pathlib import Path

import pytest

from megatron.moevement.activate import activate
from moevement_core.errors import ConfigError
from tests.bad_input.command import Needs, Reason, filled, unnamed
from tests.training import flags

EXISTS, TOO_LONG = Reason(errno.EEXIST), Reason(errno.ENAMETOOLONG)


def complaint(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> str:
    """Return the error message about the tiny model's flags followed by ``words``."""
    activate()
    from megatron.training import arguments

    for name, value in (("WORLD_SIZE", "1"), ("RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["script", *flags(), *words])
    with pytest.raises(ConfigError) as raised:
        arguments.validate_args(arguments.parse_args(), {})
    (text,) = str(raised.value).splitlines()
    return text


@pytest.mark.parametrize(
    ("word", "needs"),
    [
        ("--lr=nan", ["--lr", math.nan, 0]),
        ("--weight-decay=-inf", ["--weight-decay", -math.inf, 0]),
        ("--adam-eps=0", ["--adam-eps", 0]),
        ("--hidden-dropout=inf", ["--hidden-dropout", math.inf, 0, 1]),
        ("--adam-beta1=1", ["--adam-beta1", 1, 0]),
        ("--norm-epsilon=nan", ["--norm-epsilon", math.nan, 0]),
        ("--moe-aux-loss-coeff=inf", ["--moe-aux-loss-coeff", math.inf]),
        ("--clip-grad=x", ["--clip-grad", "'x'"]),
        ("--train-iters=-5", ["--train-iters", -5, 0]),
        ("--num-layers=-5", ["--num-layers", -5, 1]),
        ("--vocab-size=-5", ["--vocab-size", -5, "--data-path", 257]),
        ("--seed=1.5", ["--seed", "'1.5'"]),
        ("--save-interval=nan", ["--save-interval", "'nan'"]),
        ("--eval-iters=", ["--eval-iters", "''"]),
    ],
)
def test_numbers_of_megatrons_flags(word: str, needs: Needs, monkeypatch: pytest.MonkeyPatch) -> None:
    text = complaint(monkeypatch, [word])
    assert not unnamed(text, needs), text


@pytest.mark.parametrize(
    ("word", "needs"),
    [
        ("--moevement-window=nan", ["--moevement-window", math.nan, "auto", 1, 128]),
        ("--moevement-replicas=-1", ["--moevement-replicas", -1, 0]),
        ("--moevement-ranks-per-node=x", ["--moevement-ranks-per-node", "'x'"]),
        ("--moevement-peer-timeout=-inf", ["--moevement-peer-timeout", -math.inf, 0]),
        ("--moevement-lease-seconds=x", ["--moevement-lease-seconds", "x", 1]),
        ("--moevement-reorder-fraction=2", ["--moevement-reorder-fraction", 2, 0, 1]),
        ("--moevement-host-memory-gb=-1", ["--moevement-host-memory-gb", -1, 0]),
        ("--moevement-bandwidth=nan", ["--moevement-bandwidth", math.nan, "auto", 0]),
    ],
)
def test_numbers_of_our_flags(word: str, needs: Needs, monkeypatch: pytest.MonkeyPatch) -> None:
    text = complaint(monkeypatch, ["--moevement-sparse-ckpt", word])
    assert not unnamed(text, needs), text


@pytest.mark.parametrize(
    ("words", "needs"),
    [
        (["--save", "{file}", "--save-interval", "1"], ["--save", "{file}", EXISTS]),
        (["--save", "{file}/deep", "--save-interval", "1"], ["--save", "{file}/deep", Reason(errno.ENOTDIR)]),
        (["--save", "/proc/none", "--save-interval", "1"], ["--save", "/proc/none", Reason(errno.ENOENT)]),
        (["--save", "{long}", "--save-interval", "1"], ["--save", "{long}", TOO_LONG]),
        (["--save", "", "--save-interval", "1"], ["--save", "''"]),
        (["--save", "{folder}/save", "--save-interval", "-1"], ["--save-interval", -1, 0]),
        (["--load", "{file}"], ["--load", "{file}", "a file"]),
        (["--load", " "], ["--load", "' '"]),
        (["--tensorboard-dir", "{file}"], ["--tensorboard-dir", "{file}", EXISTS]),
        (["--tensorboard-dir", "/proc/none"], ["--tensorboard-dir", "/proc/none", Reason(errno.ENOENT)]),
        (["--run-dir", "{file}"], ["--run-dir", "{file}", EXISTS]),
        (["--run-dir", "{long}"], ["--run-dir", "{long}", TOO_LONG]),
        (["--data-path", "{folder}/none"], ["--data-path", "{folder}/none", "{folder}/none.bin"]),
    ],
)
def test_folders_can_be_made(words: list[str], needs: Needs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    places = {"file": tmp_path / "file", "folder": tmp_path, "long": tmp_path / ("x" * 300)}
    places["file"].touch()
    text = complaint(monkeypatch, [filled(word, places) for word in words])
    assert not unnamed(text, [filled(need, places) if isinstance(need, str) else need for need in needs]), text
