"""Script that makes torchtitan's trainer fault tolerant (docs/torchtitan.md).

torchtitan 0.3.0 builds model, optimizer, schedule and loader, and computes gradients; this script replaces its loop. It
takes the names of torchtitan's ``--module`` and ``--config``, then torchtitan's own flags. Start it with a spare::

    moevement launch --trainer torch --nproc 8 --spares 1 examples/torchtitan/train.py qwen3 qwen3_moe_debug \
        --training.steps 1000 --parallelism.expert_parallel_degree 2 --run-dir runs/titan
"""

import argparse
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

import moevement_core as ft

CPU = not torch.cuda.is_available()
if CPU:
    import cpu

from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.optimizer import register_moe_load_balancing_hook
from torchtitan.config import ConfigManager
from torchtitan.distributed import ParallelDims
from torchtitan.trainer import Trainer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("module", help="name of torchtitan's --module, such as qwen3")
parser.add_argument("config", help="name of torchtitan's --config, such as qwen3_moe_debug")
parser.add_argument("--run-dir", type=Path)
ft.add_session_flags(parser)
args, words = parser.parse_known_args()


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


class Loader:
    """torchtitan's loader, which yields all batches of an iteration together."""

    def __init__(self, trainer: Trainer) -> None:
        self._loader, self._batches = trainer.dataloader, trainer.gradient_accumulation_steps
        self.state_dict, self.load_state_dict = self._loader.state_dict, self._loader.load_state_dict

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over tuples of batches, each an input and its labels."""
        return itertools.batched(self._loader, self._batches)


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
        tokens = [moe.tokens_per_expert_E.clone() for moe in self._moe()]
        for of_layer in tokens:
            dist.all_reduce(of_layer)
        return super().reduce() | {"tokens": [of_layer.tolist() for of_layer in tokens]}

    def update(self, outcome: Mapping[str, Any]) -> None:
        """Make the optimizer's step, before which torchtitan reads the token counts."""
        for moe, tokens in zip(self._moe(), outcome["tokens"], strict=True):
            moe.tokens_per_expert_E.copy_(torch.tensor(tokens))
        super().update(outcome)

    def _moe(self) -> Iterator[Any]:
        return (layer.moe for layer in self.model.layers.values() if getattr(layer, "moe_enabled", False))


def make() -> ft.TorchBinding:
    """Let torchtitan build model, optimizer, schedule and loader, and return the binding of this rank."""
    trainer = TitanTrainer(config)
    if len(trainer.model_parts) > 1 or len(optimizers := list(trainer.optimizers)) > 1:
        raise ft.ConfigError("this script binds one model with one optimizer; leave out pipeline parallelism and "
                             "parameter groups with optimizers of several kinds")  # fmt: skip
    (model,), (optimizer,), (schedule,) = trainer.model_parts, optimizers, trainer.lr_schedulers.schedulers
    if CPU:
        cpu.sum_in_reductions(model)
    register_moe_load_balancing_hook(optimizer, [model], NoMeshes())
    if isinstance(model.lm_head, FSDPModule):
        # The chunked loss leaves it so. Otherwise a replacement's first pass gathers other weights than other ranks.
        model.lm_head.set_reshard_after_forward(True)
        model.lm_head.set_reshard_after_backward(True)

    def compute_gradients(iteration: int, batches: tuple[tuple[dict[str, torch.Tensor], torch.Tensor], ...]) -> Any:
        trainer.gc_handler.run(iteration)
        tokens = torch.stack([(labels != IGNORE_INDEX).sum() for _, labels in batches]).sum().to(trainer.device)
        dist.all_reduce(tokens)
        loss = torch.zeros((), device=trainer.device)
        for inputs, labels in batches:
            moved = {name: tensor.to(trainer.device) for name, tensor in inputs.items()}
            loss += trainer.forward_backward_step(
                input_dict=moved, labels=labels.to(trainer.device), global_valid_tokens=tokens
            ).detach()
        return loss * dist.get_world_size()  # torchtitan's losses are shares of the global one

    return TitanBinding(
        model, optimizer, compute_gradients, operators=operators(model), scheduler=schedule, loader=Loader(trainer),
        clip_norm=config.training.max_norm,
    )  # fmt: skip


def loop(session: ft.Session) -> None:
    """Train to the end. After a failure the function is called again, and goes on where the ranks agreed."""
    for iteration in ft.iterations(session, until=config.training.steps):
        session.binding.run(iteration)
        session.step()


try:
    # Nobody has replayed with captured graphs. With torch 2.13, FSDP refuses the parameters of the other backends.
    fixed = ["--training.disable_cuda_graphs", "--parallelism.spmd_backend", "partial_dtensor"]
    config = ConfigManager().parse_args(["--module", args.module, "--config", args.config, *words, *fixed])
except (ImportError, ValueError) as error:
    raise ft.ConfigError(f"torchtitan: {error}") from None
if config.checkpoint.enable or config.compile.enable or config.validator.enable:
    raise ft.ConfigError("this script neither saves torchtitan's checkpoints, nor validates, nor compiles; leave out "
                         "--checkpoint.enable, --validator.enable and --compile.enable")  # fmt: skip
if config.debug.seed is None:
    config.debug.seed = 1  # all ranks draw the same weights
if CPU:
    cpu.shrink(config)
ft.train(
    make, ft.SessionConfig.from_args(args, has_experts=False), loop, "gloo" if CPU else "nccl", run_dir=args.run_dir,
    flags=vars(args) | {"torchtitan": " ".join(words)}, make_groups=make_groups,
)  # fmt: skip
