"""Sent and stored data are read back as they were; any other bytes are refused with a named error."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moevement_core.comms import plain
from moevement_core.errors import SnapshotError
from moevement_core.policy.schedule import Saved
from moevement_core.replication.wire import MESSAGE_BYTES, Message, MessageKind
from moevement_core.snapshot.buffer import Buffer
from moevement_core.snapshot.snapshot import BOUNDARY, Entry, Header, Snapshot, SnapshotPart, as_bytes, digest_of

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.lists(inner).map(tuple),
    max_leaves=20,
)


@given(PLAIN)
def test_plain_data_comes_back_as_it_was(value: object) -> None:
    marked, tensors = plain.flatten(value)
    assert not tensors
    assert plain.restore(json.loads(json.dumps(marked)), []) == value


def test_tensors_arrays_and_random_states_come_back_bit_for_bit() -> None:
    value: dict[Any, Any] = {
        "rng": (random.getstate(), torch.get_rng_state(), np.random.get_state()),
        "tensors": [torch.randn(3, 2).bfloat16(), torch.tensor(7), torch.zeros(0), torch.tensor([True])],
        5: {"array": np.arange(6, dtype=np.int16).reshape(2, 3), "number": np.float64(0.1)},
    }
    marked, tensors = plain.flatten(value)
    back = plain.restore(json.loads(json.dumps(marked)), [as_bytes(tensor).clone() for tensor in tensors])
    assert back["rng"][0] == value["rng"][0]
    random.setstate(back["rng"][0])
    np.random.set_state(back["rng"][2])
    for left, right in zip([back["rng"][1], *back["tensors"]], [value["rng"][1], *value["tensors"]], strict=True):
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        assert torch.equal(left, right)
    np.testing.assert_array_equal(back[5]["array"], value[5]["array"])
    assert back[5]["number"] == 0.1


def test_what_is_no_data_is_refused() -> None:
    with pytest.raises(SnapshotError, match=r"\bfunction\b"):
        plain.flatten({"f": [test_what_is_no_data_is_refused]})
    for wrong in ({"@tensor": [3, "float32", [1]]}, {"@tensor": [0, "os", [1]]}, {"@bytes": "xyz"}, {"@array": 1}):
        with pytest.raises(SnapshotError, match=r"\bdecoded\b"):
            plain.restore(wrong, [torch.zeros(4, dtype=torch.uint8)])


def snapshot_of(values: torch.Tensor) -> Snapshot:
    data = as_bytes(values).clone()
    entry = Entry("layers.0.gate", Saved.FULL, "w/master", "float32", 0, data.numel(), digest_of(data))
    return Snapshot(Header(3, 17, "ab12", 1, "2", (entry,), {"lr": 0.1}, 17, {"layers.0.gate": "xxh3:0"}), Buffer(data))


def test_a_header_comes_back_as_it_was() -> None:
    header = snapshot_of(torch.randn(5)).header
    assert Header.decode(header.encode()) == header
    assert header.payload_bytes == 20


@pytest.mark.parametrize(
    "change",
    [b"", b"{}", b"[1]", b"\xff\xfe", b'{"version": 99}', ("rank", None), ("entries", [["x"]]), ("entries", 3),
     ("entries", [["o", 7, "k", "float32", 0, 4, "d"]]), ("entries", [["o", 2, "k", "float32", -4, 4, "d"]])],
)  # fmt: skip
def test_bytes_that_are_no_header_are_refused(change: bytes | tuple) -> None:
    data = change if isinstance(change, bytes) else json.dumps(
        json.loads(snapshot_of(torch.ones(1)).header.encode()) | {change[0]: change[1]}
    ).encode()  # fmt: skip
    with pytest.raises(SnapshotError):
        Header.decode(data)


def test_what_is_written_to_disk_may_be_a_part() -> None:
    tensors = {
        name: as_bytes(torch.randn(size)).clone() for name, size in (("a", 5), ("b", 33), (BOUNDARY, 2), ("c", 7))
    }
    buffer, entries, offset = torch.zeros(4096, dtype=torch.uint8), [], 0
    for name, data in tensors.items():
        entries.append(Entry(name, Saved.FULL, "0", "float32", offset, data.numel(), digest_of(data)))
        buffer[offset : offset + data.numel()] = data
        offset += 256
    header = Header(3, 17, "ab12", 1, "222", tuple(entries), {"lr": 0.1}, 17, None, SnapshotPart("242", ("b",)))
    assert Header.decode(header.encode()) == header
    part = Snapshot(header, Buffer(buffer)).for_disk()
    part.check("in a test")
    assert (part.header.contents, part.header.on_disk) == ("242", None)
    packed, pieces = part.packed()
    assert packed.payload_bytes == sum(piece.numel() for piece in pieces) < 256
    part = Snapshot(packed, Buffer(torch.cat(pieces)))
    part.check("in a test")
    assert {entry.operator: part.bytes_of(entry).tolist() for entry in part.header.entries} == {
        name: data.tolist() for name, data in tensors.items() if name != "b"
    }
    whole = snapshot_of(torch.ones(3))
    assert whole.for_disk() is whole


def test_a_flipped_bit_is_found_and_named() -> None:
    snapshot = snapshot_of(torch.randn(64))
    snapshot.check("in memory")
    snapshot.bytes_of(snapshot.header.entries[0])[77] ^= 1
    name = re.escape(snapshot.header.entries[0].name)
    with pytest.raises(SnapshotError, match=rf"\bsnapshot 17\b.*\brank 3\b.*\bin memory\b.*\b{name}\b"):
        snapshot.check("in memory")
    snapshot.buffer = Buffer(snapshot.buffer.view(0, 100))
    with pytest.raises(SnapshotError, match=r"\bsnapshot 17\b.*\b100 bytes\b.*\b256\b"):
        snapshot.check("in memory")


def test_tensors_of_an_operator_are_views_of_the_buffer() -> None:
    values = torch.randn(4)
    snapshot = snapshot_of(values)
    ((entry, tensor),) = snapshot.tensors_of({"layers.0.gate": Saved.FULL})
    assert entry.saved is Saved.FULL
    assert torch.equal(tensor, values)
    assert tensor.data_ptr() == snapshot.buffer.view(0, 16).data_ptr()
    assert not list(snapshot.tensors_of({"layers.0.gate": Saved.COMPUTE, BOUNDARY: Saved.FULL}))


@pytest.mark.parametrize("position", range(0, MESSAGE_BYTES, 7))
def test_a_message_survives_the_way_and_a_damaged_one_is_refused(position: int) -> None:
    message = Message(MessageKind.SNAPSHOT, 5, 10**12, 400, 1 << 40, 7)
    data = message.encode()
    assert data.numel() == MESSAGE_BYTES
    assert Message.decode(data) == message
    data[position] ^= 64
    with pytest.raises(SnapshotError):
        Message.decode(data)
