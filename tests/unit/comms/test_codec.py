"""Decoding returns what a rank has encoded, and refuses data that is not of the expected type."""

from __future__ import annotations

import pickle
import random

import numpy as np
import pytest
import torch

from megatron.moevement.restart.origin import Origin
from megatron.moevement.runtime.ledger import _Known
from moevement_core.comms.codec import Plain, decode, encode, pack_schedule, unpack_schedule
from moevement_core.comms.connections import Address
from moevement_core.elastic.layout import Formation, RankLayout
from moevement_core.elastic.ranges import ElementRange
from moevement_core.engine import progress as engine_progress
from moevement_core.engine.lifetime import RunSpan
from moevement_core.errors import ExchangeError
from moevement_core.operators import Operator, OperatorKind, OperatorTable, StateBytes
from moevement_core.policy.partial_experts import LostTokens
from moevement_core.policy.window import Window, WindowKind
from moevement_core.rebuild import survivors
from moevement_core.rebuild.recut import _Kind
from moevement_core.recovery.agree import RankStatus
from moevement_core.recovery.holdings import Fetch, Holding, Source, Sum, SumTerm
from moevement_core.recovery.plan import Report
from moevement_core.run.outcome import Recovery
from moevement_core.saving import totals
from moevement_core.saving.identity import JobNames
from moevement_core.saving.stage_policy import Policy, SentPolicy, _Summary
from moevement_core.session import failure_report
from moevement_core.session.rank_report import RankReport, _packed, _Sent, _unpacked
from moevement_core.session.resize import Offer
from moevement_core.snapshot.agreement import Writing
from moevement_core.storage.manifest import Manifest
from moevement_core.strategies.dense import DenseSchedule
from moevement_core.strategies.redo import RedoSchedule
from moevement_core.strategies.sparse import SparseSchedule
from moevement_core.topology.host_budget import Needs
from moevement_core.topology.topology import _Rank

OPERATORS = [
    Operator("layers.0.experts.0", OperatorKind.EXPERT, StateBytes(2, 4, 8)),
    Operator("layers.0.gate", OperatorKind.GATE, StateBytes(2, 4, 8)),
]
HOLDING = Holding(1, 7, 7, "abc", "012", Source.PARITY, Sum((SumTerm(0, Source.PEER, 1, 3),), 9))
REPORT = Report(1, 0, (HOLDING,), (5, 6))


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (3, int | None),
        (None, int | None),
        (float("inf"), float),
        ({ElementRange("w", 0, 4): 2**64 - 1}, dict[ElementRange, int]),
        (REPORT, Report),
        ([Fetch(0, 3, 1, Source.PEER)], list[Fetch]),
        (Writing.FAILED, Writing),
        (("where", (1, 2)), tuple[str, tuple[int, ...]]),
    ],
)  # fmt: skip
def test_what_comes_out_is_what_went_in(value: object, kind: object) -> None:
    assert decode(encode(value), kind) == value


def test_data_of_no_known_type_keeps_tuples_tensors_and_keys() -> None:
    value = {"rng": (3, (1, 2), None), 5: [torch.arange(3), torch.tensor(2.5), np.arange(4)], "b": b"\0\1", "e": {}}
    decoded = decode(encode(Plain(value)), Plain).value
    assert decoded["rng"] == value["rng"]
    assert decoded["b"] == value["b"]
    assert decoded["e"] == {}
    tensors = decoded[5]
    assert torch.equal(tensors[0], torch.arange(3))
    assert tensors[1].item() == 2.5
    assert tensors[1].shape == ()
    assert np.array_equal(tensors[2], np.arange(4))


def schedules() -> list[SparseSchedule | DenseSchedule]:
    table = OperatorTable(OPERATORS)
    window = Window(WindowKind.ALIGNED, (1, 2), np.array([[12, 12]]), 12.0)
    order = np.array([1, 0])
    return [
        SparseSchedule(table, order, window, start=4),
        RedoSchedule(table.with_gradients_for_compute(), order, window, start=4),
        DenseSchedule(table, 3, start=2),
    ]


@pytest.mark.parametrize("schedule", schedules())
def test_a_schedule_is_the_same_on_another_rank(schedule: SparseSchedule | DenseSchedule) -> None:
    copy = unpack_schedule(pack_schedule(schedule))
    assert type(copy) is type(schedule)
    assert copy.id == schedule.id
    assert copy.start == schedule.start
    for slot in range(schedule.size):
        assert np.array_equal(copy.contents_of_slot(slot), schedule.contents_of_slot(slot))  # type: ignore[arg-type]
    for part in ("full", "compute", "gradient"):
        assert np.array_equal(getattr(copy.table, part), getattr(schedule.table, part))


def policy(learned: object) -> Policy:
    return Policy(4, tuple(schedules()), learned, True, 1, 0, "name", RunSpan(3, 4), False)


def test_a_report_with_the_data_for_replacements() -> None:
    report = RankReport(RankStatus(1, 0), {"norm": 2.0}, {"progress": {"iteration": 3}}, begun={"rng": 1})
    received, build_data = _unpacked(decode(encode(_packed(report, [("key", 1.0)])), _Sent))
    assert received == report
    assert build_data == [("key", 1.0)]


def test_the_layouts_of_ranks_and_what_they_offer() -> None:
    layout = RankLayout(3, 4, stage=1, shard=(0, 1, 0))
    offer = decode(encode(Offer(layout, Plain({"experts": {1: (0, 2)}}))), Offer)
    assert (offer.layout, offer.data.value) == (layout, {"experts": {1: (0, 2)}})
    assert list(decode(encode({layout: Plain(1)}), dict[RankLayout, Plain])) == [layout]


def test_a_policy() -> None:
    received = decode(encode(SentPolicy.of(policy((np.ones(2), None)))), SentPolicy).policy()
    assert [schedule.id for schedule in received.schedules] == [schedule.id for schedule in schedules()]
    assert np.array_equal(received.learned[0], np.ones(2))
    assert received.needed == (3, 4)


KINDS = (
    survivors._Compared, totals.Totals, engine_progress.CheckpointCounters, Needs, Manifest, Recovery, LostTokens,
    JobNames, Address, _Rank, _Sent, RankStatus, _Summary, SentPolicy, Report, _Known, Offer, _Kind, Formation,
    Origin, failure_report._Told,
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_that_is_exchanged_can_be_checked(kind: object) -> None:
    with pytest.raises(ExchangeError):
        decode(encode("something else"), kind)


class _Runs:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit('a pickle was run')",)


@pytest.mark.parametrize(
    "kind", [int, Report, Plain, _Rank, _Sent, list[Fetch], OperatorTable, dict[ElementRange, int]]
)
def test_a_pickle_is_nothing(kind: object) -> None:
    with pytest.raises(ExchangeError):
        decode(pickle.dumps(_Runs()), kind)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (REPORT, Report),
        (Plain({"rng": (torch.arange(9), b"x")}), Plain),
        (OperatorTable(OPERATORS), OperatorTable),
        (_packed(RankReport(RankStatus(0, 0), {"norm": 2.0}), 1), _Sent),
        (SentPolicy.of(policy(1)), SentPolicy),
    ],
)  # fmt: skip
def test_damaged_bytes_are_refused_or_data_of_the_type(value: object, kind: type) -> None:
    whole, seeded = encode(value), random.Random(5)
    refused = 0
    for _ in range(3000):
        data = bytearray(whole)
        match seeded.randrange(4):
            case 0:
                del data[seeded.randrange(len(data)) :]
            case 1:
                data[seeded.randrange(len(data))] = seeded.randrange(256)
            case 2:
                at = seeded.randrange(len(data))
                data[at:at] = seeded.randbytes(seeded.randrange(1, 9))
            case _:
                data = bytearray(seeded.randbytes(seeded.randrange(64)))
        try:
            assert isinstance(decode(bytes(data), kind), kind)
        except ExchangeError:
            refused += 1
    assert refused > 1000
