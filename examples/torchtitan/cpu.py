"""Changes that let torchtitan run on CPUs, for tests and first tries. Import it before torchtitan's other modules."""

import types
from typing import Any

import torch
import torchtitan.tools.utils
from torch import nn
from torch.distributed.fsdp import FSDPModule

memory = types.SimpleNamespace(total_memory=1 << 34, name="cpu")
device = types.ModuleType("cpu_device")
vars(device).update(
    vars(torch.cpu), get_device_name=lambda device=None: "cpu", memory_stats=lambda device=None: {},
    get_device_properties=lambda device=None: memory, reset_peak_memory_stats=int, empty_cache=int,
)  # fmt: skip
# Other modules of torchtitan copy these names when they are imported.
torchtitan.tools.utils.device_type, torchtitan.tools.utils.device_module = "cpu", device

from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.common.moe import GroupedExperts


def shrink(config: Any) -> None:
    """Make the model of a torchtitan configuration small, with an attention that CPUs can differentiate."""
    model = config.model_spec.model
    model.layers = model.layers[:2]
    for _, _, parent, field in model.traverse(FlexAttention.Config):
        setattr(parent, field, ScaledDotProductAttention.Config())
    for _, experts, _, _ in model.traverse(GroupedExperts.Config):
        experts.hidden_dim = 32


def sum_in_reductions(model: nn.Module) -> None:
    """Let FSDP sum gradients without scaling them, because gloo cannot scale while it sums."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
