"""Check that repeated updates of some operators from logged gradients equal the first updates of all operators.

The check uses the Adam that Megatron chooses here: Transformer Engine's, Apex's or torch's.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from benchmarks.gpu.check import Report
from moevement_core.device import current_device

OPERATORS, ROUNDS = 6, 5
SUBSETS = ([0], [5], [1, 3], [0, 2, 4, 5])


def redo(report: Report) -> None:
    """Update all operators for some iterations, then repeat the updates for a few operators alone, and compare."""
    device = current_device().torch_device
    for name, cases in _optimizers().items():
        for what, arguments in cases.items():
            equal = [_is_equal(arguments, subset, device) for subset in SUBSETS]
            report.figure(f"{name}, {what}: equal subsets", f"{sum(equal)} of {len(equal)}")
            report.claim(f"{name}, {what}: equal bits", all(equal))


def _optimizers() -> dict[str, dict[str, dict[str, Any]]]:
    """Return the arguments of each case for the Adam that Megatron has chosen here."""
    from megatron.core.optimizer import Adam

    name = f"{Adam.__module__.partition('.')[0]}.{Adam.__name__}"
    cases: dict[str, dict[str, Any]] = {"FP32 gradients": {}}
    known = inspect.signature(Adam).parameters
    if "fused" in known and torch.cuda.is_available():
        cases["FP32 gradients, fused"] = {"fused": True}
    if "store_param_remainders" in known:
        cases["BF16 gradients, int16 remainders"] = {
            "master_weights": True, "use_decoupled_grad": True, "store_param_remainders": True,
        }  # fmt: skip
    return {name: cases}


def _is_equal(arguments: dict[str, Any], subset: list[int], device: torch.device) -> bool:
    from megatron.core.optimizer import Adam

    dtype = torch.bfloat16 if "store_param_remainders" in arguments else torch.float32
    draw = torch.Generator().manual_seed(7)

    def values() -> list[torch.Tensor]:
        shapes = [(33 + 100 * number, 65) for number in range(OPERATORS)]
        return [torch.randn(shape, generator=draw).to(device, dtype) for shape in shapes]

    weights = values()
    logged = [values() for _ in range(ROUNDS)]
    parameters = [torch.nn.Parameter(weight.clone()) for weight in weights]
    optimizer = Adam([{"params": parameters}], lr=1e-3, weight_decay=0.1, **arguments)
    for gradients in logged:
        _step(optimizer, parameters, gradients, arguments)
    again = [torch.nn.Parameter(weight.clone()) for weight in weights]
    second = Adam([{"params": again}], lr=1e-3, weight_decay=0.1, **arguments)
    for gradients in logged:
        chosen = [gradient if number in subset else None for number, gradient in enumerate(gradients)]
        _step(second, again, chosen, arguments)
    return all(_has_same_bits(optimizer, second, parameters[number], again[number]) for number in subset)


def _step(optimizer: Any, parameters: list[Any], gradients: list[Any], arguments: dict[str, Any]) -> None:
    place = "decoupled_grad" if arguments.get("use_decoupled_grad") else "grad"
    for parameter, gradient in zip(parameters, gradients, strict=True):
        setattr(parameter, place, gradient)
    optimizer.step()


def _has_same_bits(first: Any, second: Any, first_parameter: torch.Tensor, second_parameter: torch.Tensor) -> bool:
    left, right = first.state[first_parameter], second.state[second_parameter]
    pairs = [
        (first_parameter, second_parameter),
        *((left[key], right[key]) for key in left if torch.is_tensor(left[key])),
    ]
    return left.keys() == right.keys() and all(torch.equal(a, b) for a, b in pairs)
