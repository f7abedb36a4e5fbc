"""Adam with narrow state agrees with torch's Adam, with FP32 master weights, and with rounding by hand."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.moevement.fp8.adam import FP8, MASTER, PrecisionAwareAdam, halves, joined


def trained(
    parameter: torch.Tensor, optimizer: PrecisionAwareAdam | torch.optim.Optimizer, steps: int = 5
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        gradient = torch.randn(parameter.shape, generator=generator)
        if getattr(optimizer, "use_decoupled_grad", False):
            parameter.decoupled_grad = gradient  # type: ignore[attr-defined]
        else:
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()
    return parameter.detach().clone()


def start(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.randn(300, generator=torch.Generator().manual_seed(0)).to(dtype)
    return torch.nn.Parameter(values)


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_in_fp32_it_is_torchs(adam_w_mode: bool) -> None:
    options = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    own, reference = start(), start()
    torchs = (torch.optim.AdamW if adam_w_mode else torch.optim.Adam)([reference], **options)  # type: ignore[arg-type]
    first = trained(own, PrecisionAwareAdam([own], adam_w_mode=adam_w_mode, **options))  # type: ignore[arg-type]
    assert torch.allclose(first, trained(reference, torchs), rtol=1e-5, atol=1e-7)


def test_bf16_weights_and_remainders_are_fp32_masters() -> None:
    """Check that BF16 weights with 16-bit remainders train as FP32 master weights do, to the bit."""
    masters = {}
    for remainders in (True, False):
        weights = start(torch.bfloat16)
        optimizer = PrecisionAwareAdam(
            [weights], lr=1e-3, master_weights=True, use_decoupled_grad=True, store_param_remainders=remainders
        )
        after = trained(weights, optimizer)
        masters[remainders] = optimizer.get_unscaled_state(weights, MASTER)
        assert optimizer.state[weights][MASTER].dtype == (torch.int16 if remainders else torch.float32)
        assert (after.float() - masters[remainders]).abs().max() <= masters[remainders].abs().max() * 2**-8
    assert torch.equal(masters[True], masters[False])


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_halves_keep_every_bit(bits: list[int]) -> None:
    values = torch.tensor([struct.unpack("f", struct.pack("I", word))[0] for word in bits], dtype=torch.float32)
    values = values[torch.isfinite(values) & (values.abs() < 3e38)]
    upper, lower = halves(values)
    assert torch.equal(joined(upper, lower).view(torch.int32), values.view(torch.int32))
    assert ((upper.float() - values).abs() <= values.abs() * 2**-8 + 1e-38).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, FP8])
@pytest.mark.parametrize("magnitude", [1e-20, 1e-3, 1.0, 1e10])
def test_state_that_is_read_and_set_again_keeps_its_bits(dtype: torch.dtype, magnitude: float) -> None:
    weights = start()
    optimizer = PrecisionAwareAdam([weights], exp_avg_dtype=dtype)
    optimizer.initialize_state(weights)
    values = torch.randn(300, generator=torch.Generator().manual_seed(2)) * magnitude
    optimizer.set_scaled_state(weights, "exp_avg", values)
    once = optimizer.get_unscaled_state(weights, "exp_avg")
    stored, scale = optimizer.state[weights]["exp_avg"].clone(), dict(optimizer._scales.get(weights, {}))
    optimizer.set_scaled_state(weights, "exp_avg", once)
    assert torch.equal(optimizer.state[weights]["exp_avg"], stored)
    assert torch.equal(optimizer.get_unscaled_state(weights, "exp_avg"), once)
    assert all(torch.equal(optimizer._scales[weights][name], value) for name, value in scale.items())
    near = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11, FP8: 2**-4}[dtype]
    large = values.abs() > values.abs().max() * 2**-6
    assert ((once - values).abs() <= values.abs() * near)[large].all()


@pytest.mark.parametrize("dtype", [torch.float16, FP8])
def test_nothing_without_a_gradient_is_touched(dtype: torch.dtype) -> None:
    active, frozen = start(torch.bfloat16), start(torch.bfloat16)
    optimizer = PrecisionAwareAdam(
        [active, frozen], master_weights=True, use_decoupled_grad=True, master_weight_dtype=torch.float16,
        exp_avg_dtype=dtype, exp_avg_sq_dtype=torch.float16,
    )  # fmt: skip
    for parameter in (active, frozen):
        optimizer.initialize_state(parameter)
    before = [frozen.detach().clone(), *(value.clone() for value in optimizer.state[frozen].values())]
    initial = active.detach().clone()
    trained(active, optimizer, steps=2)
    assert all(torch.equal(a, b) for a, b in zip(before, [frozen, *optimizer.state[frozen].values()], strict=True))
    assert not torch.equal(active, initial)
    assert optimizer.param_groups[0]["step"] == 2


def test_state_is_loaded_in_its_own_dtypes() -> None:
    weights = start(torch.bfloat16)
    options = {"master_weights": True, "exp_avg_dtype": FP8, "exp_avg_sq_dtype": torch.float16}
    first = PrecisionAwareAdam([weights], use_decoupled_grad=True, **options)  # type: ignore[arg-type]
    trained(weights, first, steps=2)
    second = PrecisionAwareAdam([weights], use_decoupled_grad=True, **options)  # type: ignore[arg-type]
    second.load_state_dict(first.state_dict())
    for name in ("exp_avg", "exp_avg_sq", MASTER):
        second.set_scaled_state(weights, name, first.get_unscaled_state(weights, name))
        assert torch.equal(second.state[weights][name], first.state[weights][name])
    assert second.param_groups[0]["step"] == 2
