"""Observation of an iteration of a small model, and flips of bits in it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from moevement_core.audit.at_rest import StateAtRest
from moevement_core.audit.config import AuditConfig
from moevement_core.audit.corruption import Corrupter
from moevement_core.audit.evidence import AuditedModel, AuditEvidence, Computed, first_difference
from moevement_core.audit.observe import IterationObserver, before_reductions
from moevement_core.engine.layout import OperatorState
from moevement_core.policy.schedule import Saved
from moevement_core.restart.faults import CorruptedPart, Corruption
from moevement_core.snapshot.snapshot import StateTensor


class Model:
    """Two layers with a moment each, and the iteration that trains them."""

    def __init__(self, corruptions: Sequence[Corruption] = ()) -> None:
        torch.manual_seed(0)
        self.linears = [nn.Linear(8, 8) for _ in range(2)]
        self.layers = nn.ModuleList(self.linears)
        self.moments = [torch.ones(8, 8) for _ in self.layers]
        names = ["layers.0", "layers.1"]
        operators = {name: list(layer.parameters()) for name, layer in zip(names, self.linears, strict=True)}
        model = AuditedModel([self.layers], operators, lambda parameter: parameter.grad)
        self.states = {
            name: OperatorState(
                (StateTensor(name, Saved.COMPUTE, "0/weight", layer.weight.data.view(-1)),),
                (StateTensor(name, Saved.FULL, "0/exp_avg", moment.view(-1)),),
            )
            for name, layer, moment in zip(names, self.linears, self.moments, strict=True)
        }
        self.observer = IterationObserver(model)
        self.corrupter = Corrupter(corruptions, 0, self.states, model)

    def iteration(self, number: int) -> AuditEvidence:
        self.corrupter.begin(number)
        with self.observer.observing() as observed:
            x = torch.arange(1.0, 9.0)
            for layer in self.layers:
                x = torch.tanh(layer(x))
            x.sum().backward()
            before_reductions()
        return observed[0]


def test_two_executions_of_an_iteration_are_equal() -> None:
    model = Model()
    first = model.iteration(1)
    model.layers.zero_grad()
    assert first_difference(first, model.iteration(1), list(model.states)) is None
    assert [names for names, _ in first.outputs] == [("layers.0",), ("layers.1",)]
    assert first.gradients.keys() == model.states.keys()


@pytest.mark.parametrize(
    ("part", "computed"),
    [
        (CorruptedPart.WEIGHT, Computed.OUTPUT), (CorruptedPart.GRADIENT, Computed.GRADIENT),
        (CorruptedPart.ACTIVATION, Computed.OUTPUT),
    ],
)  # fmt: skip
def test_a_flip_of_any_bit_is_seen(part: CorruptedPart, computed: Computed) -> None:
    """Flip 20 different bits; each changes the evidence first where it was made, and only in its iteration."""
    sound = Model().iteration(1)
    for seed in range(20):
        model = Model([Corruption(part, 0, 1, seed=seed)])
        difference = first_difference(sound, model.iteration(1), list(model.states))
        assert difference is not None
        assert difference.computed == computed
        assert len(difference.operators) == 1


def test_a_flip_in_a_moment_changes_the_state_alone() -> None:
    model = Model([Corruption(CorruptedPart.MOMENT, 0, 2)])
    first = model.iteration(1)
    assert all(bool((moment == 1).all()) for moment in model.moments)
    model.layers.zero_grad()
    assert first_difference(first, model.iteration(2), list(model.states)) is None
    assert sum(int((moment != 1).sum()) for moment in model.moments) == 1


def test_state_that_changes_before_the_gradients_are_complete_is_found() -> None:
    """Watch an iteration without a change, one with a flip, one with an update after the gradients, and one without
    gradients.
    """
    model = Model([Corruption(CorruptedPart.WEIGHT, 0, 2)])
    at_rest = StateAtRest(model.states)
    at_rest.begin()
    model.iteration(1)
    model.moments[0].add_(1.0)
    assert at_rest.end() == ()
    at_rest.begin()
    model.iteration(2)
    assert len(at_rest.end()) == 1
    at_rest.begin()
    assert at_rest.end() == ()
    before_reductions()
    assert at_rest.end() == ()


def test_a_lasting_fault_flips_other_bits_in_each_execution() -> None:
    model = Model([Corruption(CorruptedPart.GRADIENT, 0, 3, is_lasting=True)])
    seen = []
    for number in (2, 3, 3, 4):
        model.layers.zero_grad()
        seen.append(tuple(sorted(model.iteration(number).gradients.items())))
    assert len(set(seen)) == 4


def test_stages_are_audited_in_turn() -> None:
    config = AuditConfig(10, memory=False)
    assert [config.stage_of(iteration, 3) for iteration in (0, 10, 15, 20, 30, 40)] == [2, 0, None, 1, 2, 0]
    assert AuditConfig(None, memory=False).stage_of(10, 3) is None
