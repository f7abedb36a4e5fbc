"""Frozen operators and steps with them avoid known traps, on small stand-ins for modules that need a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.moevement.optimizer.committed import CommittedOptimizer, check_supported
from megatron.moevement.optimizer.modes import Replay
from megatron.moevement.optimizer.outcome import Reduced, outcome_of, put_step_counts, step_counts
from megatron.moevement.optimizer.views import OperatorViews, Trained
from megatron.moevement.transformer.frozen import FrozenMode, gating_without_weight_gradient
from moevement_core.errors import ConfigError
from moevement_core.util.undo import UndoStack


def trained(parameter: Any, master: torch.Tensor | None = None) -> Trained:
    return Trained(parameter, master, parameter.data.view(-1))


class GroupedLinear(torch.nn.Module):
    """Stand-in for Transformer Engine's layer, which computes weight gradients if the first weight requires one."""

    num_gemms = 3

    def __init__(self) -> None:
        super().__init__()
        for index in range(3):
            setattr(self, f"weight{index}", torch.nn.Parameter(torch.full((2, 2), index + 1.0)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        weights = [getattr(self, f"weight{index}") for index in range(3)]
        wanted = weights[0].requires_grad
        used = [weight if wanted else weight.detach() for weight in weights]
        return sum((inputs @ weight for weight in used), torch.zeros(2, 2))


@pytest.mark.parametrize("frozen", [{"e0"}, {"e1"}, {"e0", "e1"}, {"e1", "e2"}])
def test_a_grouped_linear_that_looks_at_its_first_expert_only_keeps_the_gradients_of_active_ones(
    frozen: set[str],
) -> None:
    layer = GroupedLinear()
    operators = {f"e{index}": [trained(getattr(layer, f"weight{index}"))] for index in range(3)}
    mode = FrozenMode([layer], operators)
    mode.freeze(frozenset(frozen))
    layer(torch.ones(2, 2, requires_grad=True)).sum().backward()
    for name in {"e0", "e1", "e2"} - frozen:
        assert operators[name][0].parameter.grad is not None
    mode.freeze(frozenset(operators))
    assert not any(entry.parameter.requires_grad for (entry,) in operators.values()), "all frozen: nothing is computed"
    mode.end()
    assert all(entry.parameter.requires_grad for (entry,) in operators.values())


def test_what_was_never_trained_stays_so() -> None:
    layer = torch.nn.Linear(2, 2)
    layer.weight.requires_grad_(False)
    mode = FrozenMode([layer], {"o": [trained(layer.weight), trained(layer.bias)]})
    mode.freeze(frozenset({"o"}))
    mode.end()
    assert (layer.weight.requires_grad, layer.bias.requires_grad) == (False, True)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_above_a_frozen_embedding_keeps_its_gradients(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    embedding, block = torch.nn.Embedding(5, 4), torch.nn.Linear(4, 4)
    chunk = torch.nn.ModuleDict({"embedding": embedding, "block": block})
    chunk.embedding = embedding
    mode = FrozenMode([chunk], {"embedding": [trained(embedding.weight)], "block": [trained(block.weight)]})

    def run() -> torch.Tensor | None:
        chunk.zero_grad()
        output = checkpoint(block, embedding(torch.arange(5)), use_reentrant=reentrant)
        if output.requires_grad:
            output.sum().backward()
        gradient = block.weight.grad
        return None if gradient is None else gradient.clone()

    expected = run()
    mode.freeze(frozenset({"embedding"}))
    if reentrant:
        assert run() is None, "shown to fail without: all gradients of the block are lost"
    mode.begin()
    actual = run()
    mode.end()
    assert expected is not None
    assert actual is not None
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
def test_a_frozen_router_has_the_same_output_and_input_gradient(dtype: torch.dtype, bias: bool) -> None:
    from megatron.core.transformer.moe import moe_utils

    original = getattr(moe_utils.router_gating_linear, "_moevement_original", moe_utils.router_gating_linear)
    weight = torch.randn(4, 8).bfloat16().requires_grad_()
    biases = torch.randn(4).bfloat16().requires_grad_() if bias else None
    results = []
    for frozen in (False, True):
        weight.requires_grad_(not frozen)
        if biases is not None:
            biases.requires_grad_(not frozen)
        tokens = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
        weight.grad = None
        logits = gating_without_weight_gradient(original, tokens, weight, biases, dtype)
        logits.sin().sum().backward()
        assert (weight.grad is None) == frozen
        assert tokens.grad is not None
        results.append((logits, tokens.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


class Member:
    """Member of a chain of Megatron's optimizers, with torch's AdamW."""

    def __init__(self, parameter: torch.nn.Parameter, group_step: int | None) -> None:
        self.optimizer = torch.optim.AdamW([parameter], lr=0.1, weight_decay=0.1)
        if group_step is not None:
            self.optimizer.param_groups[0]["step"] = group_step


class Chained:
    config = SimpleNamespace(log_num_zeros_in_grad=False)

    def __init__(self, members: list[Member]) -> None:
        self.chained_optimizers = members
        self.grad_norms_by_group: dict[str, float] = {}

    def prepare_grads(self) -> bool:
        for member in self.chained_optimizers:
            for parameter in member.optimizer.param_groups[0]["params"]:
                parameter.grad = torch.zeros_like(parameter)
        return False

    def get_grad_norm(self) -> float:
        return 1.0

    def _compute_grad_norms_by_group(self) -> dict[str, float]:
        return {"computed": 1.0}

    def count_zeros(self) -> int:
        return 0

    def step(self) -> tuple[bool, float | None, None]:
        if self.prepare_grads():
            return False, None, None
        norm = self.get_grad_norm()
        self.grad_norms_by_group = self._compute_grad_norms_by_group()
        return self.step_with_ready_grads(), norm, None

    def step_with_ready_grads(self) -> bool:
        for member in self.chained_optimizers:
            member.optimizer.step()
        return True


def chained() -> tuple[Chained, dict[str, torch.nn.Parameter], OperatorViews]:
    parameters = {name: torch.nn.Parameter(torch.ones(3)) for name in ("a", "b")}
    optimizer = Chained([Member(parameter, None) for parameter in parameters.values()])
    for parameter in parameters.values():  # gives momentum, so that a zero gradient moves a weight
        parameter.grad = torch.ones(3)
    for member in optimizer.chained_optimizers:
        member.optimizer.step()
    views = OperatorViews({}, {name: [trained(weight, weight)] for name, weight in parameters.items()}, [])
    return optimizer, parameters, views


def committed(optimizer: Chained, views: OperatorViews) -> tuple[CommittedOptimizer, Replay]:
    """Return the commit point of an optimizer, and the mode for the steps of a replay."""
    point = CommittedOptimizer(optimizer, dict, lambda boundary: {}, lambda: None, lambda: point.step(1))
    return point, Replay(optimizer, views.trained)


def test_zero_gradients_move_weights_and_none_do_not() -> None:
    optimizer, parameters, views = chained()
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    states = {name: _state(optimizer, parameter) for name, parameter in parameters.items()}
    point, step = committed(optimizer, views)
    undo = UndoStack()
    undo.set(point, "mode", step)
    step.frozen = frozenset({"a"})
    optimizer.step()
    undo.close()
    assert torch.equal(parameters["a"], before["a"])
    assert _state(optimizer, parameters["a"]) == states["a"], "neither moments nor the step count"
    assert not torch.equal(parameters["b"], before["b"]), "momentum and decay move a weight without a gradient"
    assert _state(optimizer, parameters["b"])["step"] == 2.0
    optimizer.step()
    assert not torch.equal(parameters["a"], before["a"]), "everything is as it was"
    assert point.mark is not None, "and steps are committed again"


def _state(optimizer: Chained, parameter: torch.nn.Parameter) -> dict[str, Any]:
    states = (member.optimizer.state for member in optimizer.chained_optimizers)
    state = next(state[parameter] for state in states if parameter in state)
    return {name: value.tolist() for name, value in state.items()}


def test_the_recorded_verdict_and_norms_win() -> None:
    optimizer, parameters, views = chained()
    before = parameters["b"].detach().clone()
    point, step = committed(optimizer, views)
    point.mode = step
    step.outcome = {"overflow": True, "found_inf": [None, None], "clip_norm": None, "clip_norms_by_group": {}}
    assert optimizer.step() == (False, None, None)
    assert torch.equal(parameters["b"], before), "an overflow that only a frozen operator's gradient would show"
    step.outcome = {
        "overflow": False, "found_inf": [None, None], "clip_norm": 0.1 + 0.2, "clip_norms_by_group": {"g": 3.0},
        "num_tokens": None, "zeros": None,
    }  # fmt: skip
    assert optimizer.step()[1] == 0.1 + 0.2
    assert optimizer.grad_norms_by_group == {"g": 3.0}
    reduced = Reduced()
    reduced.take("prepare_grads", False, optimizer)
    result = optimizer.step()
    reduced.take("get_grad_norm", result[1], optimizer)
    reduced.take("_compute_grad_norms_by_group", optimizer.grad_norms_by_group, optimizer)
    assert outcome_of(result, reduced) == step.outcome
    step.outcome = None
    assert optimizer.step()[1] == 1.0


def test_steps_counted_in_groups_come_back_and_those_of_torch_are_left_alone() -> None:
    """Check mixed counts in a chain: Apex's and Transformer Engine's Adam count steps in the group, but torch's not."""
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = Chained([Member(parameter, count) for parameter, count in zip(parameters, (7, None, 9), strict=True)])
    counts = step_counts(optimizer)
    assert counts == [[7], [None], [9]]
    for member in optimizer.chained_optimizers:
        member.optimizer.param_groups[0]["step"] = -1
    del optimizer.chained_optimizers[1].optimizer.param_groups[0]["step"]
    put_step_counts(optimizer, counts)
    assert step_counts(optimizer) == counts
    assert "step" not in optimizer.chained_optimizers[1].optimizer.param_groups[0]


def test_an_optimizer_that_is_not_megatrons_chain_is_refused() -> None:
    check_supported(chained()[0])
    with pytest.raises(ConfigError, match=r"\bSimpleNamespace\b.*\bChainedOptimizer\b"):
        check_supported(SimpleNamespace(step=None))


def test_counts_of_steps_that_are_kept_do_not_move_with_live_ones() -> None:
    """Check an optimizer that counts steps in a tensor, in place, so that a CUDA graph can capture its step."""
    group: dict[str, Any] = {"params": [], "step": torch.tensor(3)}
    optimizer = SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=SimpleNamespace(param_groups=[group]))])
    kept = step_counts(optimizer)
    group["step"] += 1
    assert kept == [[3]]
    put_step_counts(optimizer, kept)
    group["step"] += 1
    assert kept == [[3]]
    assert group["step"] == 4
