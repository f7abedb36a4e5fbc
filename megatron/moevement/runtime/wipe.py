"""Injected loss of a rank's memory, for tests and demonstrations of a recovery."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from megatron.moevement.optimizer.scales import fp8_scales
from megatron.moevement.optimizer.views import OperatorViews
from megatron.moevement.runtime.live import Live
from megatron.moevement.state_digest import members, named_tensors


@torch.no_grad()
def wipe(live: Live, views: OperatorViews) -> None:
    """Overwrite all model and optimizer memory of this rank with NaN, and other training state with wrong values."""
    for chunk in live.model or []:
        for parameter in chunk.parameters():
            _spoil(parameter.data)
            if getattr(parameter, "main_grad", None) is not None:
                _spoil(parameter.main_grad)
    for trained in (entry for entries in views.trained.values() for entry in entries):
        if trained.master is not None:
            _spoil(trained.master.data)
    for member in members(live.optimizer):
        inner = getattr(member, "optimizer", None)
        if inner is None:
            continue
        for state in (*inner.state.values(), *getattr(inner, "_scales", {}).values()):
            for value in state.values():
                if torch.is_tensor(value):
                    _spoil(value)
        for group in inner.param_groups:
            group["lr"] = group["weight_decay"] = float("nan")
            if "step" in group:
                group["step"] = -1
        if hasattr(getattr(member, "grad_scaler", None), "_growth_tracker"):
            member.grad_scaler._scale = torch.full_like(member.grad_scaler._scale, float("nan"))
            member.grad_scaler._growth_tracker = member.grad_scaler._hysteresis_tracker = -1
    routers = named_tensors(live, "named_buffers", lambda name: ".router." in name)
    for buffers in (*routers, *fp8_scales(live.model or [])):
        for tensor in buffers.values():
            _spoil(tensor)
    live.scheduler.num_steps = -1
    _move_generators()


def _spoil(tensor: Any) -> None:
    tensor.fill_(float("nan") if tensor.is_floating_point() else 77)


def _move_generators() -> None:
    from megatron.core import tensor_parallel

    random.random()
    np.random.random()
    torch.rand(3)
    torch.cuda.manual_seed(random.randrange(1 << 30))
    tracker = tensor_parallel.get_cuda_rng_tracker()
    for name in tracker.get_states():
        with tracker.fork(name):
            torch.rand(3, device=torch.cuda.current_device())
