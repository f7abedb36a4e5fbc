"""Script that makes torchtitan's trainer with a mixture-of-experts model of the Qwen3 family fault tolerant.

torchtitan 0.3.0 builds model, optimizer and schedule, and computes gradients; this script replaces its loop. It was run
by hand on two CPU ranks with gloo, where a killed rank came back with equal bits. No test runs it. GPUs, expert
parallelism and redo are untried. Start it with a spare, and kill the process of a rank::

    moevement launch --trainer torch --nproc 2 --spares 1 examples/torchtitan/train.py --run-dir runs/titan

Without a GPU, the model is made smaller, and torchtitan gets what it expects of a device.
"""

import argparse
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.tools.utils
from torch import nn

import moevement_core as ft

CPU = not torch.cuda.is_available()
if CPU:  # before torchtitan's other modules copy these names
    memory = types.SimpleNamespace(total_memory=1 << 34, name="cpu")
    device = types.ModuleType("cpu_device")
    vars(device).update(
        vars(torch.cpu), get_device_name=lambda device=None: "cpu", memory_stats=lambda device=None: {},
        get_device_properties=lambda device=None: memory, reset_peak_memory_stats=int, empty_cache=int,
    )  # fmt: skip
    torchtitan.tools.utils.device_type, torchtitan.tools.utils.device_module = "cpu", device

from torch.distributed.fsdp import FSDPModule
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.optimizer import register_moe_load_balancing_hook
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import dist_sum_tensor
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.qwen3.config_registry import qwen3_moe_debug
from torchtitan.trainer import Trainer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--iterations", type=int, default=40)
parser.add_argument("--run-dir", type=Path)
ft.add_session_flags(parser)
args = parser.parse_args()


class TitanTrainer(Trainer):
    """torchtitan's trainer on process groups that this job has made."""

    dims: ParallelDims

    def init_distributed(self) -> ParallelDims:
        """Return the device meshes of this generation."""
        return self.dims


def make_groups() -> None:
    """Make the device meshes. All ranks call it in every generation, and a replacement then builds its model alone."""
    TitanTrainer.dims = ParallelDims.from_config(config.parallelism, dist.get_world_size())
    TitanTrainer.dims.build_mesh()


def operators(model: nn.Module) -> Iterator[tuple[str, ft.OperatorKind, list[nn.Parameter]]]:
    """Yield name, kind and parameters of each operator: experts, router and rest of each layer, and the model's rest.

    torchtitan holds the experts of a layer in one tensor, so they are one operator.
    """
    parts: dict[tuple[str, ft.OperatorKind], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        kind, operator = ft.OperatorKind.HEAD, "head"
        if name.startswith("layers."):
            kind, layer = ft.OperatorKind.LAYER, ft.layer_name(int(name.split(".")[1]))
            part = "experts" if ".routed_experts." in name else "router" if ".router." in name else "rest"
            operator = f"{layer}.{part}"
        parts.setdefault((operator, kind), []).append(parameter)
    for (operator, kind), parameters in parts.items():
        yield operator, kind, parameters


class NoMeshes:
    """Meshes of torchtitan that have no ranks, so that nothing is communicated."""

    ep_enabled = False

    def get_optional_mesh(self, name: str) -> None:
        """Return None, as there is no mesh of this name."""


class TitanBinding(ft.TorchBinding):
    """Binding that sums the experts' token counts in ``reduce``, and not in the optimizer's step, as torchtitan does.

    The step then balances the experts' load by torchtitan's own function, which gets meshes without ranks.
    """

    def run(self, iteration: int, frozen: frozenset[str] = frozenset()) -> None:
        """Compute gradients, and count anew the tokens of each expert."""
        for moe in self._moe():
            moe.tokens_per_expert_E.zero_()
        super().run(iteration, frozen)

    def reduce(self) -> dict[str, object]:
        """Reduce gradients, and sum the token counts of all ranks."""
        tokens = torch.stack([moe.tokens_per_expert_E for moe in self._moe()])
        dist.all_reduce(tokens)
        return super().reduce() | {"tokens": tokens.tolist()}

    def update(self, outcome: Mapping[str, Any]) -> None:
        """Make the optimizer's step, before which torchtitan reads the token counts."""
        for moe, tokens in zip(self._moe(), outcome["tokens"], strict=True):
            moe.tokens_per_expert_E.copy_(torch.tensor(tokens))
        super().update(outcome)

    def _moe(self) -> Iterator[Any]:
        return (layer.moe for layer in self.model.layers.values() if layer.moe_enabled)


def make() -> ft.TorchBinding:
    """Let torchtitan build model, optimizer and schedule, and return the binding of this rank."""
    trainer = TitanTrainer(config)
    (model,), (optimizer,), (schedule,) = trainer.model_parts, trainer.optimizers, trainer.lr_schedulers.schedulers
    for module in model.modules():
        if CPU and isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it sums
    register_moe_load_balancing_hook(optimizer, [model], NoMeshes())
    # The chunked loss leaves it so. Otherwise a replacement's first pass gathers other weights than the other ranks.
    model.lm_head.set_reshard_after_forward(True)
    model.lm_head.set_reshard_after_backward(True)
    # In a replay the embedding may be frozen, but all ranks still have to communicate in the backward pass.
    model.tok_embeddings.register_forward_hook(lambda module, inputs, output: output.requires_grad_())

    def compute_gradients(iteration: int) -> torch.Tensor:
        draws = torch.Generator().manual_seed(iteration)
        shape = dist.get_world_size() * config.training.local_batch_size, config.training.seq_len + 1
        text = torch.randint(256, shape, generator=draws).cumsum(1)[dist.get_rank() :: dist.get_world_size()] % 256
        inputs, labels = text[:, :-1].to(trainer.device), text[:, 1:].to(trainer.device)
        tokens = dist_sum_tensor((labels != IGNORE_INDEX).sum(), trainer.parallel_dims.get_mesh("batch"))
        loss = trainer.forward_backward_step(input_dict={"input": inputs}, labels=labels, global_valid_tokens=tokens)
        return loss * dist.get_world_size()  # torchtitan's losses are shares of the global one

    return TitanBinding(
        model, optimizer, compute_gradients, operators=operators(model), scheduler=schedule,
        clip_norm=config.training.max_norm,
    )  # fmt: skip


def loop(session: ft.Session) -> None:
    """Train to the end. After a failure the function is called again, and goes on where the ranks agreed."""
    for iteration in ft.iterations(session, until=args.iterations):
        session.binding.run(iteration)
        session.step()


config = qwen3_moe_debug()
config.training.local_batch_size, config.training.seq_len, config.training.steps = 2, 64, args.iterations
config.training.disable_cuda_graphs, config.checkpoint.enable, config.debug.seed = True, False, 1
config.parallelism.spmd_backend, config.parallelism.expert_parallel_degree = "partial_dtensor", 1
# Batches follow from the iteration's number, so neither text nor loader is needed.
config.tokenizer = config.dataloader = types.SimpleNamespace(build=lambda **names: None)
if CPU:
    for _, _, parent, field in config.model_spec.model.traverse(FlexAttention.Config):
        setattr(parent, field, ScaledDotProductAttention.Config())
    for _, experts, _, _ in config.model_spec.model.traverse(GroupedExperts.Config):
        experts.hidden_dim = 32
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
backend = "gloo" if CPU else "nccl"
ft.train(
    make, ft.SessionConfig.from_args(args, has_experts=False), loop, backend, run_dir=args.run_dir, flags=vars(args),
    make_groups=make_groups,
)  # fmt: skip
