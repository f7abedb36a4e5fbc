"""First difference between two executions of an iteration, and the ranks that it makes suspects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moevement_core.audit.evidence import HEAD_DEPTH, AuditEvidence, Computed, Difference, first_difference
from moevement_core.audit.replicas import ReplicaDigest
from moevement_core.audit.verdict import Finding, judge, judge_replicas
from moevement_core.comms.codec import decode, encode

ORDER = ["embedding", "layers.0", "layers.1", "head"]


def evidence(**changes: Any) -> AuditEvidence:
    sound = AuditEvidence(
        outputs=[((name,), f"output of {name}") for name in ORDER], sent="sent",
        gradients={name: f"gradient of {name}" for name in ORDER},
        state={name: f"state of {name}" for name in ORDER}, weights="weights",
    )  # fmt: skip
    return replace(sound, **changes)


def changed(values: Mapping[str, str], *names: str) -> dict[str, str]:
    return dict(values) | dict.fromkeys(names, "wrong")


def test_equal_executions_have_no_difference() -> None:
    assert first_difference(evidence(), evidence(), ORDER) is None


def test_the_difference_nearest_to_the_cause_counts() -> None:
    """Let a wrong output of layers.0 change everything that the rank computes after it."""
    sound = evidence()
    outputs = [sound.outputs[0], *((names, "wrong") for names, _ in sound.outputs[1:])]
    wrong = evidence(
        outputs=outputs, sent="wrong", gradients=changed(sound.gradients, *ORDER), state=changed({}, *ORDER),
        weights="wrong",
    )  # fmt: skip
    assert first_difference(sound, wrong, ORDER) == Difference(Computed.OUTPUT, (0, 1), ("layers.0",))
    assert first_difference(sound, replace(wrong, outputs=sound.outputs), ORDER) == Difference(
        Computed.SENT, (0, 0), ()
    )


def test_the_backward_pass_computes_the_last_operators_first() -> None:
    sound = evidence()
    last = first_difference(sound, evidence(gradients=changed(sound.gradients, "layers.1", "layers.0")), ORDER)
    other = first_difference(sound, evidence(gradients=changed(sound.gradients, "layers.0")), ORDER)
    assert last is not None
    assert other is not None
    assert last.operators == ("layers.0", "layers.1")
    assert last.place < other.place


def test_state_comes_before_the_weights_that_follow_from_it() -> None:
    sound = evidence()
    wrong = evidence(state=changed(sound.state, "head"), weights="wrong")
    assert first_difference(sound, wrong, ORDER) == Difference(Computed.STATE, (0, 0), ("head",))
    assert first_difference(sound, evidence(weights="wrong"), ORDER) == Difference(Computed.WEIGHTS, (0, 0), ())


def test_a_module_of_several_operators_is_narrowed_to_those_that_changed() -> None:
    outputs: list[tuple[tuple[str, ...], str]] = [(("experts.0", "experts.1"), "right")]
    sound = AuditEvidence(outputs=outputs, gradients={"experts.0": "a", "experts.1": "b"})
    wrong = AuditEvidence(outputs=[(outputs[0][0], "wrong")], gradients={"experts.0": "a", "experts.1": "c"})
    assert first_difference(sound, wrong, []) == Difference(Computed.OUTPUT, (-1, 0), ("experts.1",))
    fewer = AuditEvidence(outputs=[], gradients=sound.gradients)
    assert first_difference(sound, fewer, []) == Difference(Computed.OUTPUT, (HEAD_DEPTH, 0), ())


def found(stage: int, difference: Difference | None = None, clean_at: int | None = None) -> Finding:
    return Finding(stage, clean_at, difference)


def test_the_rank_with_the_earliest_difference_is_the_suspect() -> None:
    findings = [
        found(0, clean_at=90),
        found(1, Difference(Computed.STATE, (0, 0), ("layers.1",)), clean_at=70),
        found(1, Difference(Computed.OUTPUT, (1, 3), ("layers.1",)), clean_at=None),
        found(1, Difference(Computed.OUTPUT, (HEAD_DEPTH, 1), ("head",)), clean_at=60),
    ]
    verdict = judge([decode(encode(each), Finding) for each in findings])
    assert [(suspect.rank, suspect.operators) for suspect in verdict.suspects] == [(2, ("layers.1",))]
    assert verdict.clean_at == 70
    assert not judge([found(0), found(1)]).suspects


def test_ranks_that_compute_a_result_together_are_all_suspects() -> None:
    together = Difference(Computed.OUTPUT, (1, 3), ("layers.0",))
    verdict = judge([found(0, together), found(0, together), found(0)])
    assert [suspect.rank for suspect in verdict.suspects] == [0, 1]
    assert verdict.clean_at is None


def test_of_two_stages_the_one_nearer_to_the_input_is_the_suspect() -> None:
    """Let stage 1 differ in its very first output, because stage 0 has sent something wrong from its last layer."""
    later = found(1, Difference(Computed.OUTPUT, (4, 0), ("layers.4",)))
    cause = found(0, Difference(Computed.OUTPUT, (3, 9), ("layers.3",)))
    assert [suspect.rank for suspect in judge([later, cause]).suspects] == [1]


def replicas(*digests: str) -> list[Finding]:
    return [Finding(0, 8, replicas=(ReplicaDigest("", "all", digest),)) for digest in digests]


def test_the_minority_of_replicas_is_wrong() -> None:
    assert not judge_replicas(replicas("a", "a", "a")).suspects
    assert [suspect.rank for suspect in judge_replicas(replicas("a", "b", "a")).suspects] == [1]


def test_two_replicas_alone_cannot_tell_which_of_them_is_wrong() -> None:
    verdict = judge_replicas(replicas("a", "b"))
    assert [suspect.rank for suspect in verdict.suspects] == [0, 1]
    assert verdict.clean_at == 8
