"""A small mixture-of-experts language model in plain torch, with a training loop of its own, made fault tolerant.

The file shows what to write for another trainer, such as torchtitan or your own: fault tolerance needs only the class
``Trainer`` below. Start a job with a spare::

    moevement launch --trainer torch --nproc 2 --spares 1 examples/plain_torch/train.py --run-dir runs/plain

Kill the process of a rank: the spare takes over this rank, and ``moevement verify`` shows that the run equals a
failure-free run bit for bit.

Every rank trains on a share of each batch. Experts are spread over the ranks (expert parallelism), and tokens travel
to the experts and back. Everything else is equal on all ranks (data parallelism). The job has no pipeline, so all ranks
roll back together. The model has one operator for each expert, each router, the rest of each layer, the embedding, and
the head. With ``--moevement-elastic`` the job goes on with fewer ranks if no spare is left.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import moevement_core as ft

VOCABULARY, WIDTH, LAYERS, EXPERTS, LENGTH = 256, 32, 2, 8, 64
BATCH = 8
"""Sequences of an iteration, on all ranks together."""
SIZES = (1, 2, 4, 8)
"""Numbers of ranks with which the job may train: those that divide the experts and the batch."""


# The model


class Exchange(torch.autograd.Function):
    """Autograd function that exchanges rows between ranks. The backward pass sends the gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        ctx.send, ctx.receive = send, receive
        received = rows.new_empty(sum(receive), rows.shape[1])
        dist.all_to_all_single(received, rows.contiguous(), receive, send)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        back = gradient.new_empty(sum(ctx.send), gradient.shape[1])
        dist.all_to_all_single(back, gradient.contiguous(), ctx.send, ctx.receive)
        return back, None, None


class Experts(nn.Module):
    """Router and this rank's share of the experts; every token goes to one expert."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        # Every rank initializes the weights of all experts, so the model does not depend on the number of ranks.
        experts = [nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)) for _ in range(EXPERTS)]
        share = EXPERTS // dist.get_world_size()
        self.first = dist.get_rank() * share
        self.experts = nn.ModuleList(experts[self.first : self.first + share])
        self.counts = torch.zeros(EXPERTS, dtype=torch.float64)
        """Number of tokens that this rank routed to each expert since :meth:`RouterCounts.take`, ``[EXPERTS]``."""
        self.is_counting = True

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        gates, chosen = self.router(tokens).softmax(-1).max(-1)
        load = torch.bincount(chosen, minlength=EXPERTS)
        if self.is_counting:
            self.counts += load
        order = torch.argsort(chosen, stable=True)
        loads = torch.empty(dist.get_world_size(), EXPERTS, dtype=load.dtype)
        dist.all_gather_into_tensor(loads.view(-1), load)
        share = len(self.experts)
        send = load.view(-1, share).sum(1).tolist()
        arriving = loads[:, self.first : self.first + share]
        arrived = Exchange.apply(tokens[order], send, arriving.sum(1).tolist())
        # Each rank sends rows sorted by expert. Here the rows of one expert are collected from all ranks.
        pieces = [
            rank.split(arriving[index].tolist()) for index, rank in enumerate(arrived.split(arriving.sum(1).tolist()))
        ]
        done = [expert(torch.cat([rank[i] for rank in pieces])) for i, expert in enumerate(self.experts)]
        by_rank = [rows.split(arriving[:, index].tolist()) for index, rows in enumerate(done)]
        leaving = torch.cat([rows[rank] for rank in range(len(pieces)) for rows in by_rank])
        returned = Exchange.apply(leaving, arriving.sum(1).tolist(), send)
        return torch.empty_like(returned).index_copy(0, order, returned) * gates[:, None]


class Layer(nn.Module):
    """Layer of causal attention and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.moe_norm, self.moe = nn.LayerNorm(WIDTH), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + F.dropout(self.out(mixed), 0.1)  # draws from the default generator, which boundary() saves
        return x + self.moe(self.moe_norm(x).view(-1, WIDTH)).view_as(x)


class Model(nn.Module):
    """Language model that predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = [Layer() for _ in range(LAYERS)]
        self.layers = nn.ModuleList(self.blocks)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        if not x.requires_grad:  # A replay may freeze the embedding, but all ranks still have to exchange gradients.
            x.requires_grad_()
        for layer in self.blocks:
            x = layer(x)
        return F.cross_entropy(self.head(x).view(-1, VOCABULARY), targets.reshape(-1))


def operators_of(model: Model) -> Iterator[tuple[str, ft.OperatorKind, list[nn.Parameter]]]:
    """Yield name, kind and parameters of each operator. Names depend on the place in the model, not on the rank."""
    yield "embedding", ft.OperatorKind.EMBEDDING, list(model.embedding.parameters())
    for number, layer in enumerate(model.blocks):
        moe = layer.moe
        for index, expert in enumerate(moe.experts):
            yield ft.expert_name(number, moe.first + index), ft.OperatorKind.EXPERT, list(expert.parameters())
        yield ft.gate_name(number), ft.OperatorKind.GATE, list(moe.router.parameters())
        rest = [
            parameter for part in (layer.norm, layer.qkv, layer.out, layer.moe_norm) for parameter in part.parameters()
        ]
        yield ft.non_expert_name(number), ft.OperatorKind.NON_EXPERT, rest
    yield "head", ft.OperatorKind.HEAD, list(model.head.parameters())


# The trainer, as fault tolerance sees it


class Trainer(ft.Binding):
    """Model, optimizer and data of one rank.

    Args:
        seed: seed of weights, batches, and dropout.
    """

    def __init__(self, seed: int) -> None:
        if EXPERTS % dist.get_world_size():
            raise ft.ConfigError(
                f"--nproc {dist.get_world_size()}: the model has {EXPERTS} experts; give a divisor of this number"
            )
        torch.manual_seed(seed)
        self.model = Model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        # The optimizer would create this state in the first step, but the first snapshots need it before.
        for parameter in self.model.parameters():
            self.optimizer.state[parameter] = {
                "step": torch.zeros(()), "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }  # fmt: skip
        self.gradients = {parameter: torch.zeros(parameter.numel()) for parameter in self.model.parameters()}
        """Gradients of the last update by parameter, flat, for redo (``--moevement-recovery``)."""
        self.parameters = {name: parameters for name, _, parameters in operators_of(self.model)}
        self.sparse = [parameter for layer in self.model.blocks for parameter in layer.moe.experts.parameters()]
        experts = {id(parameter) for parameter in self.sparse}
        self.dense = [parameter for parameter in self.model.parameters() if id(parameter) not in experts]
        self.corpus = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
        self.seed = seed
        self._draw_anew()

    def _draw_anew(self) -> None:
        """Seed the random numbers of dropout, which differ between ranks."""
        torch.manual_seed((self.seed * 1000 + self.iteration) * 1000 + 1 + dist.get_rank())

    # Parts of a step. A failure may happen between any two parts.

    def forward_backward(self, iteration: int) -> None:
        """Compute the gradients of this rank's share of the batch, a pure function of ``iteration`` and seed."""
        draws = torch.Generator().manual_seed(self.seed * 1000 + iteration)
        starts = torch.randint(len(self.corpus) - LENGTH - 1, (BATCH,), generator=draws)
        own = starts[dist.get_rank() :: dist.get_world_size()]
        text = torch.stack([self.corpus[start : start + LENGTH + 1] for start in own])
        loss = self.model(text[:, :-1], text[:, 1:])
        loss.backward()
        self.losses[iteration] = {"lm loss": loss.detach()}

    def reduce(self) -> dict[str, Any]:
        """Average gradients over ranks, and return their norm."""
        world = dist.get_world_size()
        # Frozen parameters stay in the buffer: the bits of a sum over ranks may depend on the position in the buffer.
        flat = torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.view(-1) for p in self.dense]) / world
        dist.all_reduce(flat)
        for parameter, mean in zip(self.dense, flat.split([p.numel() for p in self.dense]), strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(mean.view_as(parameter))
        own = [parameter.grad.div_(world) for parameter in self.sparse if parameter.grad is not None]
        squares = torch.stack([torch.zeros(())] + [gradient.square().sum() for gradient in own]).sum()
        dist.all_reduce(squares)
        return {"norm": float((squares + flat.square().sum()).sqrt())}

    def update(self, outcome: Mapping[str, Any]) -> None:
        """Clip gradients by the norm of the whole model, and make the optimizer's step.

        The optimizer does not change parameters without a gradient.
        """
        scale = min(1.0, 1.0 / (outcome["norm"] + 1e-6))
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
                self.gradients[parameter].copy_(parameter.grad.view(-1))
        self.optimizer.step()
        self.optimizer.zero_grad()

    # State of this rank

    def place(self) -> ft.Place:
        return ft.Place(same_state=dist.get_rank())

    def operators(self) -> list[ft.Operator]:
        states = self.states()
        return [
            ft.Operator(name, kind, ft.StateBytes.of_tensors(*_weighed(states[name])))
            for name, kind, _ in operators_of(self.model)
        ]

    def states(self) -> dict[str, ft.OperatorState]:
        states = {}
        for name, parameters in self.parameters.items():
            compute, full, gradient = [], [], []
            for number, parameter in enumerate(parameters):
                weight = parameter.data.view(-1)
                compute.append(ft.StateTensor(name, ft.Saved.COMPUTE, f"{number}/weight", weight))
                moving = {"master": weight, **self.optimizer.state[parameter]}
                full += [
                    ft.StateTensor(name, ft.Saved.FULL, f"{number}/{what}", tensor.view(-1))
                    for what, tensor in moving.items()
                ]
                gradient.append(ft.StateTensor(name, ft.Saved.GRADIENT, f"{number}", self.gradients[parameter]))
            states[name] = ft.OperatorState(tuple(compute), tuple(full), tuple(gradient))
        return states

    def boundary(self) -> dict[str, Any]:
        return {"rng": torch.get_rng_state(), "rank": dist.get_rank(), "progress": {"iteration": self.iteration}}

    def put_boundary(self, boundary: Mapping[str, Any]) -> None:
        self.put_progress(boundary["progress"])
        if boundary["rank"] == dist.get_rank():
            torch.set_rng_state(boundary["rng"].clone())
        else:  # an elastic job has grown, and no rank drew these numbers before
            self._draw_anew()

    def put_progress(self, progress: Mapping[str, int]) -> None:
        self.iteration = progress["iteration"]

    def commit_point(self, vote: ft.Vote) -> ft.Commit:
        return ft.UpdateCommit(self, vote)

    def counts(self, table: ft.OperatorTable, ordering: ft.Ordering) -> ft.Counts:
        return RouterCounts(self.model, table)

    # After a failure

    def regroup(self) -> None:
        """Do nothing: all communication uses the default group, and no object holds a reference to it."""

    def build(self, build_data: Any) -> bool:
        return True  # the constructor just built everything, as at the start of the job

    def clear_gradients(self) -> None:
        self.optimizer.zero_grad()

    def gradients_left(self) -> list[str]:
        return [name for name, parameter in self.model.named_parameters() if parameter.grad is not None]

    def gather_replicas(self) -> None:
        """Do nothing: every rank has saved all the state that it holds."""

    def audited(self) -> ft.AuditedModel:
        return ft.AuditedModel([self.model], self.parameters, lambda parameter: parameter.grad)

    def settings(self) -> dict[str, Any]:
        return {"world_size": dist.get_world_size(), "seed": self.seed}

    @contextmanager
    def replaying(self, shared_from: int | None, feeding: Any) -> Iterator[ft.Trainer]:
        try:
            yield Replay(self)
        finally:
            self.model.requires_grad_(True)

    def wipe(self) -> None:
        for state in self.states().values():
            for tensor in state.full:
                tensor.tensor.fill_(float("nan"))
        torch.rand(3)


class Replay(ft.Trainer):
    """Trainer of a replay, which executes iterations again while some operators are frozen."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        tensors = (entry for state in trainer.states().values() for entry in (*state.compute, *state.full))
        self.live = {(entry.operator, entry.saved, entry.key): entry.tensor for entry in tensors}

    def load(self, snapshot: ft.Snapshot, loads: Mapping[str, ft.Saved], *, is_shared: bool = True) -> None:
        for entry, tensor in snapshot.tensors_of(loads):
            self.live[entry.operator, entry.saved, entry.key].copy_(tensor)

    def redo(self, iteration: int, gradients: Mapping[str, Sequence[tuple[str, torch.Tensor]]], outcome: Any) -> None:
        """Repeat an update from logged gradients, which are already clipped.

        The optimizer does not change parameters without a gradient.
        """
        for name, logged in gradients.items():
            for key, gradient in logged:
                parameter = self.trainer.parameters[name][int(key)]
                parameter.grad = gradient.clone().view_as(parameter)
        self.trainer.optimizer.step()
        self.trainer.optimizer.zero_grad()

    def gather_replicas(self) -> None:
        self.trainer.gather_replicas()

    def put_boundary(self, boundary: Any) -> None:
        self.trainer.put_boundary(boundary)

    def freeze(self, iteration: int, frozen: frozenset[str]) -> None:
        for name, parameters in self.trainer.parameters.items():
            for parameter in parameters:
                parameter.requires_grad_(name not in frozen)

    def run(self, iteration: int, outcome: Mapping[str, Any] | None) -> Mapping[str, Any]:
        self.trainer.forward_backward(iteration)
        ft.before_reductions()
        reduced = self.trainer.reduce()
        # A replay uses the norm of the first execution, because frozen operators have no gradients now.
        self.step_outcome = outcome["step"] if outcome is not None else reduced
        self.trainer.update(self.step_outcome)
        self.trainer.iteration = iteration
        return self.trainer.losses[iteration]

    def record(self) -> Mapping[str, Any]:
        return {"step": self.step_outcome}


class RouterCounts:
    """Counts of tokens by expert. The strategy orders operators by these counts, and saves popular experts last."""

    tokens_of_run = None
    """Unknown, because the model does not know the length of the run."""

    def __init__(self, model: Model, table: ft.OperatorTable) -> None:
        self.routers = [layer.moe for layer in model.blocks]
        self.width = len(table)
        self.places = [
            table.index_of[ft.expert_name(number, expert)] for number in range(LAYERS) for expert in range(EXPERTS)
        ]

    @property
    def paused(self) -> bool:
        return not self.routers[0].is_counting

    @paused.setter
    def paused(self, paused: bool) -> None:
        """Stop or resume counting. A replay stops it, because the tokens were counted in the first execution."""
        for router in self.routers:
            router.is_counting = not paused

    def take(self) -> torch.Tensor:
        taken = torch.cat([router.counts for router in self.routers])
        for router in self.routers:
            router.counts.zero_()
        return taken

    def by_operator(self, taken: list[torch.Tensor]) -> torch.Tensor:
        counts = torch.zeros(len(taken), self.width, dtype=torch.float64)
        counts[:, self.places] = torch.stack(taken)
        return counts


def _weighed(state: ft.OperatorState) -> Sequence[list[torch.Tensor]]:
    masters = [entry.tensor for entry in state.full if entry.key.endswith("/master")]
    moments = [entry.tensor for entry in state.full if not entry.key.endswith("/master")]
    return [entry.tensor for entry in state.compute], masters, moments, [entry.tensor for entry in state.gradient]


# The loop


def main() -> None:
    """Train a model. After a failure, :func:`moevement_core.train` calls ``loop`` again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=60, metavar="N")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="folder for metrics, events and a run summary")
    ft.add_session_flags(parser)
    args = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    config = ft.SessionConfig.from_args(args, has_experts=True)

    def loop(session: ft.Session) -> None:
        trainer = session.binding
        assert isinstance(trainer, Trainer)
        for iteration in ft.iterations(session, until=args.iterations):
            trainer.forward_backward(iteration)
            session.step()

    ft.train(lambda: Trainer(args.seed), config, loop, "gloo", run_dir=args.run_dir, flags=vars(args), sizes=SIZES)


if __name__ == "__main__":
    main()
