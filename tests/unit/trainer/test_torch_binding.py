"""Binding for a module and an optimizer of torch: operators by module, state before the first step, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from moevement_core.errors import ConfigError
from moevement_core.operators import OperatorKind
from moevement_core.trainer.capabilities import refuse_without_progress
from moevement_core.trainer.first_state import make_state
from moevement_core.trainer.module_operators import operators_of
from moevement_core.trainer.torch_binding import TorchBinding


def model() -> nn.ModuleDict:
    torch.manual_seed(1)
    layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 4)])) for _ in range(2))
    return nn.ModuleDict({"embedding": nn.Embedding(8, 4), "layers": layers, "norm": nn.LayerNorm(4)})


def names(module: nn.Module) -> list[tuple[str, OperatorKind, int]]:
    return [(name, kind, len(parameters)) for name, kind, parameters in operators_of(module)]


def test_layers_embeddings_and_the_rest_are_operators() -> None:
    assert names(model()) == [
        ("embedding", OperatorKind.EMBEDDING, 1), ("layers.0", OperatorKind.LAYER, 4),
        ("layers.1", OperatorKind.LAYER, 4), ("head", OperatorKind.HEAD, 2),
    ]  # fmt: skip
    assert names(nn.Linear(2, 2)) == [("head", OperatorKind.HEAD, 2)]


def test_a_shared_parameter_is_in_its_first_operator_only() -> None:
    tied = model()
    tied["out"] = nn.Linear(4, 8, bias=False)
    tied["out"].weight = tied["embedding"].weight
    assert [count for _, _, count in names(tied)] == [1, 4, 4, 2]


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        torch.optim.Adam,
        torch.optim.RMSprop,
        torch.optim.Adagrad,
        lambda parameters: torch.optim.Adam(parameters, amsgrad=True, foreach=True),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    ],
)
def test_the_first_step_is_the_same_with_state_that_was_made_before(
    make: Callable[..., torch.optim.Optimizer],
) -> None:
    weights = []
    for is_made in (False, True):
        module = model()
        optimizer = make(list(module.parameters()))
        if is_made:
            before = [parameter.clone() for parameter in module.parameters()]
            make_state(optimizer)
            assert all(map(torch.equal, before, module.parameters()))
            assert all(parameter.grad is None for parameter in module.parameters())
        for step in range(3):
            for number, parameter in enumerate(module.parameters()):
                parameter.grad = torch.full_like(parameter, 0.1 * (number + step))
            optimizer.step()
        weights.append([parameter.detach().clone() for parameter in module.parameters()])
    assert all(map(torch.equal, *weights))


def test_muon_begins_as_without_the_binding() -> None:
    weight = [nn.Parameter(torch.eye(4)) for _ in range(2)]
    optimizers = [torch.optim.Muon([each], lr=0.1) for each in weight]
    make_state(optimizers[1])
    for each, optimizer in zip(weight, optimizers, strict=True):
        each.grad = torch.arange(16.0).view(4, 4)
        optimizer.step()
    assert torch.equal(*weight)


def test_state_that_exists_stays() -> None:
    module = model()
    optimizer = torch.optim.AdamW(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    before = {id(each): state["exp_avg"].clone() for each, state in optimizer.state.items()}
    make_state(optimizer)
    assert all(torch.equal(before[id(each)], state["exp_avg"]) for each, state in optimizer.state.items())


def _of(module: nn.Module, **options: object) -> TorchBinding:
    optimizer = torch.optim.AdamW(module.parameters())
    return TorchBinding(module, optimizer, lambda iteration: torch.zeros(()), **options)  # type: ignore[arg-type]


def test_a_moving_average_keeps_its_state_while_the_optimizer_s_is_created() -> None:
    """Creating the optimizer's state makes a step, after which the hook adds the weights of that moment."""
    module = model()
    average = AveragedModel(module)
    optimizer = torch.optim.AdamW(module.parameters())
    optimizer.register_step_post_hook(lambda *_: average.update_parameters(module))
    binding = TorchBinding(module, optimizer, lambda iteration: torch.zeros(()), extra=[average])
    assert int(average.n_averaged) == 0
    saved = binding.boundary_copy()
    optimizer.step()
    assert int(average.n_averaged) == 1
    binding.put_boundary(saved)
    assert int(average.n_averaged) == 0


def test_extra_state_that_is_kept_as_it_is_loaded_leaves_the_boundary_alone() -> None:
    class Average:
        value = torch.zeros(1)

        def state_dict(self) -> dict[str, Any]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.value = state["value"]

    module, average = model(), Average()
    binding = TorchBinding(
        module, torch.optim.SGD(module.parameters()), lambda iteration: torch.zeros(()), extra=[average]
    )
    saved = binding.boundary_copy()
    binding.put_boundary(saved)
    average.value += 1
    binding.put_boundary(saved)
    assert average.value == 0


def test_a_boundary_without_progress_is_refused() -> None:
    class Nested(TorchBinding):
        def boundary(self) -> dict[str, Any]:
            return {"base": super().boundary()}

    module = model()
    binding = Nested(module, torch.optim.SGD(module.parameters()), lambda iteration: torch.zeros(()))
    with pytest.raises(ConfigError, match=r"\bNested\b.*\bprogress\b.*\bsuper\b"):
        refuse_without_progress(binding)


def test_a_parameter_in_two_optimizers_is_refused() -> None:
    module = model()
    optimizers = [torch.optim.AdamW(module.parameters()), torch.optim.SGD(list(module.parameters())[:1])]
    with pytest.raises(ConfigError, match=r"\bparameter\b.*\boptimizers\b"):
        TorchBinding(module, optimizers, lambda iteration: torch.zeros(()))


def test_an_optimizer_whose_state_does_not_begin_at_0_is_refused() -> None:
    with pytest.raises(ConfigError, match="mu_product"):
        make_state(torch.optim.NAdam(model().parameters()))


def test_operators_hold_each_parameter_once() -> None:
    module = model()
    parts = list(operators_of(module))
    for wrong, named in ((parts[1:], "embedding.weight"), ([*parts, parts[0]], "embedding.weight")):
        with pytest.raises(ConfigError, match=named):
            _of(module, operators=wrong)


def test_a_parameter_that_is_not_contiguous_is_refused() -> None:
    module = nn.Linear(4, 4)
    module.weight = nn.Parameter(torch.empty(4, 4).t())
    with pytest.raises(ConfigError, match="weight"):
        _of(module)


def test_the_state_of_each_operator_is_made_of_live_tensors() -> None:
    module = model()
    states = _of(module).states()
    (weight,) = states["embedding"].compute
    weight.tensor.fill_(7.0)
    assert next(module["embedding"].parameters()).data_ptr() == weight.tensor.data_ptr()
    assert all(value == 7.0 for value in weight.tensor.tolist())
    assert [entry.key for entry in states["embedding"].full] == ["0/weight", "0/step", "0/exp_avg", "0/exp_avg_sq"]
