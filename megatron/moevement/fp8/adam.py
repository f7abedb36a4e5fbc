"""Adam with state in narrow formats, behind the interface of Transformer Engine's FusedAdam.

``--use-precision-aware-optimizer`` needs it. Updates are computed in FP32, whatever the format of the state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from megatron.moevement.fp8 import formats
from megatron.moevement.fp8.tensor import QuantisedTensor

FP8 = torch.uint8
"""Dtype by which Megatron denotes FP8 state (E4M3)."""
_SCALED = {torch.float16: torch.finfo(torch.float16).max / 2.0, FP8: torch.finfo(formats.E4M3).max}
"""Largest magnitude of scaled state, for each dtype whose range is so small that state needs a scale."""
MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master_param"


class PrecisionAwareAdam(torch.optim.Optimizer):
    """Adam with decoupled weight decay, or with L2 regularisation.

    The state of each parameter is ``exp_avg``, ``exp_avg_sq``, and with ``master_weights`` also ``master_param``. FP16
    and FP8 state has a scale for each tensor (``_scales``). The scale is a power of two, so state that is read and
    written back keeps its bits. With ``store_param_remainders``, the parameter itself has the upper 16 bits of its
    master weights, and ``master_param`` has only the lower 16 bits (``int16``).

    Args:
        params: parameters or groups, as for any optimizer.
        lr: learning rate of groups that do not set their own. The arguments ``betas``, ``eps`` and ``weight_decay``
            are also defaults for groups.
        betas: decay rates of the two moments.
        eps: number that is added to the root of the second moment.
        weight_decay: weight decay per step, as a factor of ``lr``.
        adam_w_mode: True if weight decay is decoupled from gradients.
        master_weights: True if the optimizer keeps master weights and writes parameters from them.
        use_decoupled_grad: True if gradients are in ``decoupled_grad``, of any dtype.
        master_weight_dtype: FP32, FP16 or FP8. Transformer Engine's optimizer does not support FP8 here.
        exp_avg_dtype: dtype of the first moment: FP32, BF16, FP16 or FP8.
        exp_avg_sq_dtype: dtype of the second moment: FP32, BF16, FP16 or FP8.
        store_param_remainders: True to keep only the lower 16 bits of master weights. It applies only to FP32 master
            weights of BF16 parameters.
        capturable: ignored; Transformer Engine's optimizer needs it for CUDA graphs.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adam_w_mode: bool = True,
        master_weights: bool = False,
        use_decoupled_grad: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        store_param_remainders: bool = False,
        capturable: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.adam_w_mode = adam_w_mode
        self.master_weights = master_weights
        self.use_decoupled_grad = use_decoupled_grad
        self.store_param_remainders = store_param_remainders and master_weights and master_weight_dtype == torch.float32
        self.dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype, MASTER: master_weight_dtype}
        self._scales: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        """Scales of FP16 and FP8 state, by parameter and name of the state, FP32 ``[1]``.

        Transformer Engine's optimizer has an attribute with this name.
        """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load group options and state; state keeps its saved dtypes, whereas torch's own method would convert it."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})
            for parameter, place in zip(group["params"], saved["params"], strict=True):
                for name, value in state_dict["state"].get(place, {}).items():
                    self.state[parameter][name] = value
                    if value.dtype in _SCALED and name not in self._scales.setdefault(parameter, {}):
                        self._scales[parameter][name] = torch.ones(1, device=value.device)

    def keeps_remainder(self, parameter: torch.Tensor) -> bool:
        """Return True if the parameter itself is the upper half of the master weights."""
        is_bf16 = parameter.dtype == torch.bfloat16 and not isinstance(parameter, QuantisedTensor)
        return self.store_param_remainders and is_bf16

    def _dtype(self, parameter: torch.Tensor, name: str) -> torch.dtype:
        return torch.int16 if name == MASTER and self.keeps_remainder(parameter) else self.dtypes[name]

    def initialize_state(self, parameter: torch.Tensor, store_param_remainders: bool | None = None) -> None:
        """Set the moments to zero, and the master weights to the parameter's values.

        Args:
            parameter: parameter whose state is initialised.
            store_param_remainders: ignored; Transformer Engine's optimizer has this argument.
        """
        for name in MOMENTS:
            self._allocate(parameter, name)
        if self.master_weights:
            self._allocate(parameter, MASTER)
            if not self.keeps_remainder(parameter):
                self.set_scaled_state(parameter, MASTER, parameter.detach().float())

    def _allocate(self, parameter: torch.Tensor, name: str) -> None:
        dtype = self._dtype(parameter, name)
        self.state[parameter][name] = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
        if dtype in _SCALED:
            self._scales.setdefault(parameter, {})[name] = torch.ones(1, device=parameter.device)

    @torch.no_grad()
    def get_unscaled_state(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """Return the moment or master weights ``name`` of a parameter, unscaled and in FP32."""
        stored = self.state[parameter][name]
        if name == MASTER and self.keeps_remainder(parameter):
            return joined(parameter.detach(), stored)
        if stored.dtype in _SCALED:
            values = stored.view(formats.E4M3) if stored.dtype == FP8 else stored
            return values.float() * self._scales[parameter][name]
        return stored.float()

    @torch.no_grad()
    def set_scaled_state(self, parameter: torch.Tensor, name: str, values: torch.Tensor) -> None:
        """Store FP32 ``values`` as the moment or master weights ``name`` of a parameter.

        If the parameter is the upper half of the master weights, this call changes the parameter.
        """
        if getattr(self.state[parameter].get(name), "dtype", None) != self._dtype(parameter, name):
            self._allocate(parameter, name)
        stored = self.state[parameter][name]
        values = values.float().view(stored.shape)
        if name == MASTER and self.keeps_remainder(parameter):
            upper, lower = halves(values)
            parameter.detach().copy_(upper)
            stored.copy_(lower)
        elif stored.dtype in _SCALED:
            scale = _scale_of(values, _SCALED[stored.dtype])
            self._scales[parameter][name].copy_(scale)
            scaled = values / scale
            stored.copy_(formats.cast(scaled, formats.E4M3).view(FP8) if stored.dtype == FP8 else scaled)
        else:
            stored.copy_(values)

    @torch.no_grad()
    def write_weights(self, parameter: torch.Tensor) -> None:
        """Copy the master weights into the parameter, unless the parameter itself holds their upper half."""
        if self.master_weights and not self.keeps_remainder(parameter):
            parameter.detach().copy_(self.get_unscaled_state(parameter, MASTER))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update parameters that have a gradient, and their master weights."""
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                gradient = getattr(parameter, "decoupled_grad", None) if self.use_decoupled_grad else parameter.grad
                if gradient is not None:
                    self._update(group, parameter, gradient.detach().float())

    def _update(self, group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        if not self.state.get(parameter):
            self.initialize_state(parameter)
        (beta1, beta2), step, decay = group["betas"], group["step"], group["weight_decay"]
        weights = self.get_unscaled_state(parameter, MASTER) if self.master_weights else parameter.detach().float()
        if not self.adam_w_mode:
            gradient = gradient + decay * weights
        first, second = (self.get_unscaled_state(parameter, name) for name in MOMENTS)
        first = beta1 * first + (1.0 - beta1) * gradient
        second = beta2 * second + (1.0 - beta2) * gradient * gradient
        change = (first / (1.0 - beta1**step)) / ((second / (1.0 - beta2**step)).sqrt() + group["eps"])
        if self.adam_w_mode:
            change = change + decay * weights
        weights = weights - group["lr"] * change
        for name, values in zip(MOMENTS, (first, second), strict=True):
            self.set_scaled_state(parameter, name, values)
        if self.master_weights:
            self.set_scaled_state(parameter, MASTER, weights)
            self.write_weights(parameter)
        else:
            parameter.detach().copy_(weights)


def halves(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return FP32 values as the nearest BF16 (ties away from zero), and their remaining bits as ``int16``."""
    bits = master.view(torch.int32)
    upper = (bits + 0x8000) >> 16
    lower = (bits - (upper << 16)).to(torch.int16)
    return upper.to(torch.int16).view(torch.bfloat16), lower


def joined(upper: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
    """Return the FP32 values whose parts :func:`halves` returned."""
    return ((upper.view(torch.int16).to(torch.int32) << 16) + lower.to(torch.int32)).view(torch.float32)


def _scale_of(values: torch.Tensor, largest: float) -> torch.Tensor:
    """Return the smallest power of two ``s`` for which no magnitude in ``values / s`` exceeds ``largest``.

    The result is 1 if all values are 0, or if a value is not finite.
    """
    amax = formats.amax_of(values.view(1, -1))
    mantissa, exponent = torch.frexp(amax / largest)
    scale = torch.ldexp(torch.ones_like(amax), exponent - (mantissa == 0.5).to(exponent.dtype))
    return torch.where((amax > 0) & torch.isfinite(amax), scale, torch.ones_like(amax)).view(1)
