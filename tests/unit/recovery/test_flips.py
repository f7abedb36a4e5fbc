"""Drills flip a bit that a digest covers, once in a job, and report how the damage was detected."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moevement_cli import drill
from moevement_core import log
from moevement_core.errors import SnapshotError
from moevement_core.recovery import flips
from moevement_core.replication.wire import Message, MessageKind, checksum
from moevement_core.restart.faults import Flip, FlipKind
from moevement_core.util.damage import Damage
from tests.unit.snapshot.loopback import Loopback, Wire


@pytest.fixture(autouse=True)
def rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("RANK", "0")
    yield
    flips.begin(())


def sent_through(channel: str, kind: FlipKind, *frames: torch.Tensor) -> list[torch.Tensor]:
    """Return what a peer receives of ``frames`` through a channel that flips a bit."""
    flips.begin((Flip(kind, seed=3),))
    wire = Wire()
    transport = flips.flipping_transport(channel, Loopback(wire, 0))
    for frame in frames:
        transport.send(1, 4, frame)
    arrived = []
    for frame in frames:
        data = torch.empty_like(frame)
        Loopback(wire, 1).receive(0, 4, data)
        arrived.append(data)
    return arrived


def tensor(iteration: int) -> list[torch.Tensor]:
    header, payload = torch.arange(200, dtype=torch.uint8), torch.arange(100, dtype=torch.uint8)
    message = Message(MessageKind.TENSOR, 0, iteration, header.numel(), payload.numel(), check=checksum(header))
    return [message.encode(), header, payload]


def test_one_bit_of_one_payload_is_flipped_and_what_is_sent_stays_as_it_is() -> None:
    frames = [*tensor(1), *tensor(2)]
    before = [frame.clone() for frame in frames]
    arrived = sent_through("feeds", FlipKind.FEEDS, *frames)
    assert all(torch.equal(left, right) for left, right in zip(frames, before, strict=True))
    differing = [
        number for number, (left, right) in enumerate(zip(arrived, frames, strict=True)) if (left != right).any()
    ]
    assert differing == [2], "the payload of the first"
    changed = arrived[2] ^ frames[2]
    assert sorted(changed.tolist())[-1].bit_count() == 1
    assert int((changed != 0).sum()) == 1


def test_a_flip_of_a_message_is_refused() -> None:
    message = Message(MessageKind.SNAPSHOT, 0, 7, 10, 20)
    (arrived,) = sent_through("snapshots", FlipKind.MESSAGES, message.encode())
    with pytest.raises(SnapshotError):
        Message.decode(arrived)


def test_nothing_is_between_who_sends_and_the_wire_without_such_a_flip() -> None:
    inner = Loopback(Wire(), 0)
    flips.begin((Flip(FlipKind.COPIES),))
    assert flips.flipping_transport("feeds", inner) is inner


def test_a_flip_of_a_header_is_found_by_its_checksum() -> None:
    encoded, header, _ = tensor(1)
    message = Message.decode(encoded)
    message.refuse_unless_whole(header)
    header[77] ^= 1
    with pytest.raises(SnapshotError, match=r"\biteration 1\b"):
        message.refuse_unless_whole(header)


def test_a_line_of_the_log_says_what_was_found_and_is_read_back() -> None:
    damage = Damage("the digest of a file", "snapshot 3 of rank 1: w/master of layers.0.gate", "planning again")
    assert Damage.parse(str(damage)) == damage
    assert Damage.parse("iteration 3: no memory") is None


def lines(folder: Path, *entries: tuple[float, str]) -> None:
    (folder / "logs").mkdir(parents=True)
    records = [json.dumps({log.NAME: text, "level": "INFO", "rank": 2, "time": at}) for at, text in entries]
    (folder / "logs" / "rank_2.out").write_text("\n".join(["something else", *records]) + "\n")


FLIP = flips.PREFIX + json.dumps(
    {"kind": "own", "rank": 2, "owner": 2, "iteration": 3, "what": "w", "byte": 1, "bit": 0}
)
DAMAGE = str(Damage("a digest", "snapshot 3", "another one"))


@pytest.mark.parametrize(
    ("entries", "code", "is_right", "after_s"),
    [
        ([(1.0, FLIP), (1.5, DAMAGE)], 1, True, 0.5),
        ([(1.0, FLIP)], 1, False, None),
        ([(0.5, DAMAGE), (1.0, FLIP)], 1, False, None),
        ([(1.5, DAMAGE)], 1, False, None),
    ],
)
def test_only_what_is_found_after_it_was_flipped_counts(
    tmp_path: Path, entries: list[tuple[float, str]], code: int, is_right: bool, after_s: float | None
) -> None:
    """Judge the flipped bit of a job whose output says why it ended."""
    lines(tmp_path / "own", *entries)
    (tmp_path / "own.console").write_text("moevement: why\n")
    result = drill._found(FlipKind.OWN, tmp_path / "own", code, "digest")
    assert result.is_right == is_right
    assert result.after_s == after_s
    assert result.ended_by is not None
    assert re.search(r"\b1\b.*\bmoevement: why$", result.ended_by), "the exit code, and the last line"
    assert result.ended_by in result.outcome


def test_another_final_state_is_never_right(tmp_path: Path) -> None:
    lines(tmp_path / "own", (1.0, FLIP), (1.5, DAMAGE))
    digest = {"all": "other", "parts": {}, "ranks": []}
    (tmp_path / "own" / "summary.json").write_text(json.dumps({"state_digest": digest}))
    result = drill._found(FlipKind.OWN, tmp_path / "own", 0, "digest")
    assert not result.is_right
    assert (result.is_equal, result.ended_by) == (False, None)
    assert result.outcome != replace(result, is_equal=True).outcome
