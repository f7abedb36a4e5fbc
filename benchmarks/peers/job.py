"""Job that all loops of the benchmark train: a small MoE in plain torch, its data, and reports to the benchmark.

The module needs torch alone, because loops of other systems run in an environment without this project.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

FOLDER_VARIABLE = "PEERS_FOLDER"
"""Environment variable with the folder of the job, in which the benchmark listens at :data:`SOCKET`."""
ITERATIONS_VARIABLE = "PEERS_ITERATIONS"
SIZE_VARIABLE = "PEERS_SIZE"
SOCKET = "reports"
RANKS = 4
VOCABULARY = 256

torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
# The first optimizer of a process imports torch._dynamo, for seconds. So a process in reserve does it before it waits.


@dataclass(frozen=True)
class Size:
    """Size of the model and of the batch of one rank."""

    hidden: int
    layers: int
    experts: int
    sequences: int
    length: int


SIZES = {"small": Size(128, 2, 8, 8, 128), "tiny": Size(16, 1, 2, 2, 16)}
"""Sizes by name: ``small`` is measured, ``tiny`` is for tests."""


class Experts(nn.Module):
    """MoE layer in which the router gives each token to two experts."""

    def __init__(self, hidden: int, experts: int) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(hidden), nn.Linear(hidden, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden, 2 * hidden), nn.GELU(), nn.Linear(2 * hidden, hidden))
            for _ in range(experts)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x``, of shape [tokens, hidden], plus the outputs of each token's experts."""
        normed = self.norm(x)
        shares, chosen = self.router(normed).softmax(-1).topk(2)
        total = x
        for number, expert in enumerate(self.experts):
            token, place = (chosen == number).nonzero(as_tuple=True)
            total = total.index_add(0, token, expert(normed[token]) * shares[token, place, None])
        return total


class Model(nn.Module):
    """Embedding, MoE layers and head. Every process builds the same weights."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, size.hidden)
        self.layers = nn.ModuleList(Experts(size.hidden, size.experts) for _ in range(size.layers))
        self.head = nn.Linear(size.hidden, VOCABULARY)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the loss of predicting each next token of ``text``, of shape [sequences, length + 1]."""
        x = self.embedding(text[:, :-1]).flatten(0, 1)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x), text[:, 1:].flatten())


def size() -> Size:
    """Return the size that the benchmark wants."""
    return SIZES[os.environ.get(SIZE_VARIABLE, "small")]


def iterations() -> int:
    """Return the number of iterations that the benchmark wants."""
    return int(os.environ[ITERATIONS_VARIABLE])


def folder() -> Path:
    """Return the folder of the job, on a local disk."""
    return Path(os.environ[FOLDER_VARIABLE])


def make() -> tuple[Model, torch.optim.Optimizer]:
    """Return model and optimizer with the same weights in every process."""
    torch.manual_seed(1)
    model = Model(size())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def batch(iteration: int, rank: int) -> torch.Tensor:
    """Return the tokens of one rank in an iteration, of shape [sequences, length + 1]."""
    draws = torch.Generator().manual_seed(iteration * RANKS + rank)
    steps = torch.randint(4, (size().sequences, size().length + 1), generator=draws)
    return steps.cumsum(1) % VOCABULARY


def average(model: nn.Module) -> None:
    """Replace gradients by their means over all ranks, with one collective."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    flat = torch.cat([_whole(gradient).view(-1) for gradient in gradients]).div_(dist.get_world_size())
    dist.all_reduce(flat)
    for gradient, mean in zip(gradients, flat.split([_whole(each).numel() for each in gradients]), strict=True):
        _whole(gradient).copy_(mean.view_as(_whole(gradient)))


def _whole(gradient: torch.Tensor | None) -> torch.Tensor:
    if gradient is None:
        raise ValueError("a parameter has no gradient; every expert must get a token, as a larger batch ensures")
    return gradient


def committed(iteration: int, rank: int) -> None:
    """Report that this rank has made the update of ``iteration``. The benchmark reads the clock when it receives it."""
    _send({"rank": rank, "iteration": iteration})


def finished(model: nn.Module, rank: int) -> None:
    """Report the digest of the final weights, and the memory of this process."""
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.contiguous().numpy().tobytes())
    _send({"rank": rank, "digest": digest.hexdigest()})


def _send(report: dict[str, Any]) -> None:
    report["pid"] = os.getpid()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(json.dumps(report).encode(), str(folder() / SOCKET))
