"""Any bytes from the store or the network are decoded, or refused with an error of the right type."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moevement_core.errors import ExchangeError, SnapshotError
from moevement_core.rendezvous.roster import Death, MemberInfo, Roster
from moevement_core.replication.wire import Message, MessageKind

ROSTER = Roster(
    3, {0: 5, 1: 2}, (Death(1, 0, 77, "was killed by signal 9", 1.5),), (), ("rank 1: ValueError",), formed_at=2.0,
    ranks_before=4, nodes={0: "a", 1: "b"}, devices={0: 1},
)  # fmt: skip
CARD = MemberInfo(5, 77, "host", "node", 1, ("GPU-1", "GPU-2"))
MESSAGE = Message(MessageKind.SNAPSHOT, 3, 17, 100, 2000, 1)


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data.ljust(64, b"\0")[:64]), dtype=torch.uint8)


DECODERS: list[tuple[Any, bytes, Callable[[bytes], Any], type[Exception]]] = [
    (ROSTER, ROSTER.encode().encode(), Roster.decode, ExchangeError),
    (CARD, CARD.encode().encode(), MemberInfo.decode, ExchangeError),
    (MESSAGE, MESSAGE.encode().numpy().tobytes(), lambda data: Message.decode(_tensor(data)), SnapshotError),
]


@pytest.mark.parametrize(("value", "data", "decode", "refusal"), DECODERS)
def test_what_was_encoded_comes_out(
    value: object, data: bytes, decode: Callable[[bytes], object], refusal: type[Exception]
) -> None:
    assert decode(data) == value


@pytest.mark.parametrize(("value", "data", "decode", "refusal"), DECODERS)
def test_whatever_comes_is_refused_by_name_or_of_the_type(
    value: object, data: bytes, decode: Callable[[bytes], object], refusal: type[Exception]
) -> None:
    seeded, refused = random.Random(11), 0
    inputs = [b"", b"[" * 100_000, b"{" * 100_000, b"9" * 5000, b"null", b"[]", b"{}", b'"x"', b"\xff" * 64]
    for _ in range(4000):
        damaged = bytearray(data)
        match seeded.randrange(4):
            case 0:
                del damaged[seeded.randrange(len(damaged)) :]
            case 1:
                damaged[seeded.randrange(len(damaged))] = seeded.randrange(256)
            case 2:
                at = seeded.randrange(len(damaged))
                damaged[at:at] = seeded.randbytes(seeded.randrange(1, 9))
            case _:
                damaged = bytearray(seeded.randbytes(seeded.randrange(100)))
        inputs.append(bytes(damaged))
    for raw in inputs:
        try:
            assert isinstance(decode(raw), type(value))
        except refusal:
            refused += 1
    assert refused > 2000
