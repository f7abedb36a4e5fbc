"""Reports of a generation's ranks, which an unauthenticated peer may change in the store at any moment."""

from __future__ import annotations

import json
from unittest.mock import Mock

from moevement_core.rendezvous.entered import Entered

LEFT = json.dumps({"at": 1.0}).encode()


def test_a_member_has_left_though_its_word_is_destroyed_right_after_it_was_seen() -> None:
    """Check that a report stays valid once it was read. Else the coordinator would give up the only state left."""
    values = iter([LEFT, None, LEFT, LEFT, LEFT, LEFT])  # the store reads a forged value as None
    store = Mock(read=lambda key: next(values), has_rung=lambda bell: True)
    store.check = lambda keys: all(store.read(key) is not None for key in keys)
    entered = Entered(store)
    entered.begin(0, [1])
    for _ in range(2):
        entered.leaving()
    assert entered.left == {1: json.loads(LEFT)}


def test_each_value_is_read_once() -> None:
    """Let members write one after the other. Reads of all values each time would be N^2 reads in a recovery."""
    ranks, written, reads = 50, set[str](), list[str]()

    def read(key: str) -> bytes | None:
        reads.append(key)
        return LEFT if key in written else None

    entered = Entered(Mock(read=read, has_rung=lambda bell: True))
    entered.begin(0, range(ranks))
    for first in range(0, ranks, 10):
        written |= {f"generation/0/left/{member}" for member in range(first, first + 10)}
        entered.leaving()
    assert len(entered.left) == ranks
    assert len(reads) == sum(range(10, ranks + 1, 10))
