"""A small mixture-of-experts language model in plain torch, with a training loop of its own, made fault tolerant.

Start a job with a spare, and kill the process of a rank. The spare takes over this rank, and ``moevement verify`` shows
that the run equals a failure-free run bit for bit. With ``--moevement-elastic`` the job can do without a spare::

    moevement launch --trainer torch --nproc 2 --spares 1 examples/plain_torch/train.py --run-dir runs/plain

Experts are spread over the ranks (expert parallelism), and tokens travel to the experts and back. Everything else is
equal on all ranks (data parallelism).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_to_all_single

import moevement_core as ft

VOCABULARY, WIDTH, LAYERS, EXPERTS, LENGTH, BATCH = 256, 32, 2, 8, 64, 8


class Experts(nn.Module):
    """Router and this rank's share of the experts; every token goes to one expert."""

    def __init__(self, layer: int, counts: ft.TokenCounts) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        # Every rank makes all experts, so that the model does not depend on the number of ranks.
        experts = [nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)) for _ in range(EXPERTS)]
        self.first = dist.get_rank() * (share := EXPERTS // dist.get_world_size())
        self.experts = nn.ModuleList(experts[self.first : self.first + share])
        self.layer, self.counts = layer, counts

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        gates, chosen = self.router(tokens).softmax(-1).max(-1)
        load = torch.bincount(chosen, minlength=EXPERTS)
        self.counts.add(self.layer, load)
        order = torch.argsort(chosen, stable=True)
        loads = torch.empty(dist.get_world_size(), EXPERTS, dtype=load.dtype)
        dist.all_gather_into_tensor(loads.view(-1), load)
        arriving = loads[:, self.first : self.first + len(self.experts)]
        send, receive = load.view(len(loads), -1).sum(1).tolist(), arriving.sum(1).tolist()
        arrived = all_to_all_single(tokens.new_empty(sum(receive), WIDTH), tokens[order], receive, send)
        # Each rank sends rows sorted by expert. Here the rows of one expert are collected from all ranks.
        pieces = [rank.split(rows) for rank, rows in zip(arrived.split(receive), arriving.tolist(), strict=True)]
        done = [expert(torch.cat([rank[i] for rank in pieces])) for i, expert in enumerate(self.experts)]
        by_rank = [rows.split(arriving[:, index].tolist()) for index, rows in enumerate(done)]
        leaving = torch.cat([rows[rank] for rank in range(len(pieces)) for rows in by_rank])
        returned = all_to_all_single(torch.empty_like(tokens), leaving, send, receive)
        return torch.empty_like(returned).index_copy(0, order, returned) * gates[:, None]


class Layer(nn.Module):
    """Layer of causal attention and experts."""

    def __init__(self, number: int, counts: ft.TokenCounts) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.moe_norm, self.moe = nn.LayerNorm(WIDTH), Experts(number, counts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + F.dropout(self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True)), 0.1)
        return x + self.moe(self.moe_norm(x).view(-1, WIDTH)).view_as(x)


class Model(nn.Module):
    """Language model that predicts the next byte."""

    def __init__(self, counts: ft.TokenCounts) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = [Layer(number, counts) for number in range(LAYERS)]
        self.layers = nn.ModuleList(self.blocks)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.blocks:
            x = layer(x)
        return F.cross_entropy(self.head(x).view(-1, VOCABULARY), targets.reshape(-1))

    def operators(self) -> Iterator[tuple[str, ft.OperatorKind, list[nn.Parameter]]]:
        """Yield name, kind and parameters of each operator of this rank. Names do not depend on the rank."""
        yield "embedding", ft.OperatorKind.EMBEDDING, list(self.embedding.parameters())
        for number, layer in enumerate(self.blocks):
            for index, expert in enumerate(layer.moe.experts):
                yield ft.expert_name(number, layer.moe.first + index), ft.OperatorKind.EXPERT, list(expert.parameters())
            yield ft.gate_name(number), ft.OperatorKind.GATE, list(layer.moe.router.parameters())
            rest = [each for name, each in layer.named_parameters() if not name.startswith("moe.")]
            yield ft.non_expert_name(number), ft.OperatorKind.NON_EXPERT, rest
        yield "head", ft.OperatorKind.HEAD, list(self.head.parameters())


def make(seed: int) -> ft.TorchBinding:
    """Return model, optimizer and data of one rank. Its weights equal those of other ranks, except for its experts."""
    if EXPERTS % dist.get_world_size():
        raise ft.ConfigError(f"--nproc {dist.get_world_size()}: the model has {EXPERTS} experts; give a divisor")
    torch.manual_seed(seed)
    counts = ft.TokenCounts(range(LAYERS), EXPERTS)
    model = Model(counts)
    corpus = torch.tensor(list(Path(argparse.__file__).read_bytes()))

    def compute_gradients(iteration: int) -> dict[str, torch.Tensor]:
        draws = torch.Generator().manual_seed(seed * 1000 + iteration)
        starts = torch.randint(len(corpus) - LENGTH - 1, (BATCH,), generator=draws)
        own = starts[dist.get_rank() :: dist.get_world_size()]
        text = torch.stack([corpus[start : start + LENGTH + 1] for start in own])
        (loss := model(text[:, :-1], text[:, 1:])).backward()
        return {"lm loss": loss}

    return ft.TorchBinding(
        model, torch.optim.AdamW(model.parameters(), lr=3e-3), compute_gradients, operators=model.operators(),
        local=[each for layer in model.blocks for each in layer.moe.experts.parameters()], counts=counts,
        clip_norm=1.0, seed=seed,
    )  # fmt: skip


def main() -> None:
    """Train a model. After a failure, ``ft.train`` calls ``loop`` again, which goes on where the ranks agreed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=60, metavar="N")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="folder for metrics, events and a run summary")
    ft.add_session_flags(parser)
    args = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    config = ft.SessionConfig.from_args(args, has_experts=True)

    def loop(session: ft.Session) -> None:
        assert isinstance(session.binding, ft.Binding)
        for iteration in ft.iterations(session, until=args.iterations):
            session.binding.run(iteration)
            session.step()

    sizes = (1, 2, 4, 8)  # numbers of ranks that divide the experts and the batch
    ft.train(lambda: make(args.seed), config, loop, "gloo", run_dir=args.run_dir, flags=vars(args), sizes=sizes)


if __name__ == "__main__":
    main()
