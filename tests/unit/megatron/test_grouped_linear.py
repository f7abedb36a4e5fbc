"""A grouped linear layer leaves weight gradients to this project's kernel, which computes those of active experts."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.moevement.optimizer.views import Trained
from megatron.moevement.transformer.experts import _with_own_weight_gradients
from megatron.moevement.transformer.frozen import FrozenMode
from megatron.moevement.transformer.grouped_linear import SplitWeightGradients
from megatron.moevement.transformer.kernel_choice import splits_weight_gradients
from moevement_core.errors import ConfigError
from tests.grouped_layer import GroupedLinear

COUNTS, INPUTS, OUTPUTS = [3, 1, 4], 6, 5
CONFIG = SimpleNamespace(
    params_dtype=torch.float32, expert_model_parallel_size=1, gradient_accumulation_fusion=False
)  # fmt: skip


class Products(TorchDispatchMode):
    """Counter of matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in ("mm", "addmm", "matmul")
        return func(*args, **(kwargs or {}))


def layer(*, is_split: bool) -> GroupedLinear:
    torch.manual_seed(3)
    linear = GroupedLinear(len(COUNTS), INPUTS, OUTPUTS, config=CONFIG, init_method=torch.nn.init.normal_)
    if is_split:
        SplitWeightGradients(linear)
    return linear


def run(linear: GroupedLinear, frozen: set[str]) -> tuple[torch.Tensor, int]:
    """Run a forward and a backward pass with some experts frozen; return the input's gradient and all products."""
    operators = {f"e{expert}": [Trained(weight, None, weight.data.view(-1))]
                 for expert, weight in enumerate(linear.parameters())}  # fmt: skip
    mode = FrozenMode([linear], operators)
    mode.freeze(frozenset(frozen))
    inputs = torch.linspace(-1, 1, sum(COUNTS) * INPUTS).view(-1, INPUTS).requires_grad_()
    with Products() as products:
        output, bias = linear(inputs, COUNTS)
        assert bias is None
        output.sin().sum().backward()
    mode.end()
    assert all(weight.requires_grad for weight in linear.parameters())
    assert inputs.grad is not None
    return inputs.grad, products.count


@pytest.mark.parametrize("frozen", [set(), {"e0"}, {"e1"}, {"e0", "e2"}, {"e0", "e1", "e2"}])
def test_active_experts_have_the_gradients_of_autograd_and_frozen_ones_cost_nothing(frozen: set[str]) -> None:
    whole, split = layer(is_split=False), layer(is_split=True)
    expected, _ = run(whole, set())
    actual, products = run(split, frozen)
    assert torch.equal(actual, expected)
    for expert, (weight, all_active) in enumerate(zip(split.parameters(), whole.parameters(), strict=True)):
        if f"e{expert}" in frozen:
            assert weight.grad is None
        else:
            torch.testing.assert_close(weight.grad, all_active.grad)
    active = len(COUNTS) - len(frozen)
    assert products == 2 * len(COUNTS) + active, "outputs, input gradients, and weight gradients of active experts"


def test_without_the_split_a_mixed_layer_computes_all() -> None:
    linear = layer(is_split=False)
    _, products = run(linear, {"e1"})
    assert products == 3 * len(COUNTS)


def test_a_pass_that_fails_leaves_every_weight_as_it_was() -> None:
    linear = layer(is_split=True)
    linear.weight1.requires_grad_(False)
    with pytest.raises(RuntimeError):
        linear(torch.ones(2, INPUTS), COUNTS)
    assert [weight.requires_grad for weight in linear.parameters()] == [True, False, True]


def test_an_interrupted_pass_is_undone_before_training_continues() -> None:
    linear = layer(is_split=True)
    split: Any = linear.split_weight_gradients
    split._before(linear, ())  # The restart's exception strikes here, and no hook runs afterwards.
    assert not any(weight.requires_grad for weight in linear.parameters())
    split.reset(linear)
    assert all(weight.requires_grad for weight in linear.parameters())
    linear.weight1.requires_grad_(False)
    split.reset(linear)
    assert not linear.weight1.requires_grad, "a reset without an interruption changes nothing"


def test_experts_that_are_separate_layers_are_refused() -> None:
    one_each = SimpleNamespace(local_experts=[torch.nn.Linear(2, 2)])
    with pytest.raises(ConfigError, match=r"--moevement-frozen-kernels wgrad\b.*--moe-grouped-gemm\b"):
        _with_own_weight_gradients(one_each)


@pytest.mark.parametrize(
    ("change", "named"),
    [({"add_bias_linear": True}, "--disable-bias-linear"), ({"fp8": "hybrid"}, "--fp8-format"),
     ({"moe_single_grouped_weight": True}, "--moe-single-grouped-weight"), ({"hidden_size": 12}, "--hidden-size 12")],
)  # fmt: skip
def test_layers_whose_weight_gradients_cannot_be_computed_outside_are_refused(
    change: dict[str, Any], named: str
) -> None:
    config = {"add_bias_linear": False, "hidden_size": 16, "moe_ffn_hidden_size": 8, "activation_func": object()}
    args = Namespace(moevement_frozen_kernels="wgrad")
    assert splits_weight_gradients(args, SimpleNamespace(**config)), "any activation"
    assert not splits_weight_gradients(Namespace(moevement_frozen_kernels="off"), SimpleNamespace(**config | change))
    with pytest.raises(ConfigError, match=rf"--moevement-frozen-kernels wgrad\b.*{named}\b.*\boff\b"):
        splits_weight_gradients(args, SimpleNamespace(**config | change))
