"""The shortest fault-tolerant training script: a model and an optimizer of torch, and a loop.

Start it with a spare, kill the process of a rank, and look at the run::

    moevement launch --trainer torch --nproc 2 --spares 1 examples/plain_torch/small.py --run-dir runs/small
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import moevement_core as ft

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--iterations", type=int, default=60)
parser.add_argument("--run-dir", type=Path)
ft.add_session_flags(parser)
args = parser.parse_args()


def make() -> ft.TorchBinding:
    """Return model, optimizer and data; every process builds the same weights."""
    torch.manual_seed(1)
    layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(4))
    model = nn.ModuleDict({"embedding": nn.Embedding(256, 64), "layers": layers, "head": nn.Linear(64, 256)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.iterations)

    def compute_gradients(iteration: int) -> torch.Tensor:
        """Compute the gradients of this rank's share of the batch, which depends on the iteration alone."""
        draws = torch.Generator().manual_seed(iteration)
        text = torch.randint(256, (8, 33), generator=draws).cumsum(1) % 256
        own = text[dist.get_rank() :: dist.get_world_size()]
        x = model["embedding"](own[:, :-1])
        for layer in layers:
            x = x + layer(x)
        loss = nn.functional.cross_entropy(model["head"](x).flatten(0, 1), own[:, 1:].flatten())
        loss.backward()
        return loss

    return ft.TorchBinding(model, optimizer, compute_gradients, scheduler=schedule, clip_norm=1.0)


def loop(session: ft.Session) -> None:
    """Train to the end. After a failure the function is called again, and goes on where the ranks agree."""
    for iteration in ft.iterations(session, until=args.iterations):
        session.binding.run(iteration)
        session.step()


config = ft.SessionConfig.from_args(args, has_experts=False)
ft.train(make, config, loop, "gloo", run_dir=args.run_dir, flags=vars(args))
