"""A small mixture-of-experts language model in plain torch, with a training loop of its own, made fault tolerant.

Whoever trains with torchtitan, or with a trainer of their own, reads this file and knows what to write: the class
``Trainer`` below is all that fault tolerance has to know. It is started, with a spare, as::

    moevement launch --trainer torch --nproc 2 --spares 1 examples/plain_torch/train.py --run-dir runs/plain

Kill a rank: the spare takes over its rank, and ``moevement verify`` finds the bits of a failure-free run.

Every rank trains on its own batches. Experts are spread over the ranks (expert parallelism), and tokens travel to them
and back; everything else is the same on all ranks (data parallelism). There is no pipeline, so all ranks roll back
together. The model has one operator for each expert, each router, the rest of each layer, the embedding, and the head.
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

VOCABULARY, WIDTH, LAYERS, EXPERTS, LENGTH, BATCH = 256, 32, 2, 8, 64, 4


# The model


class Exchange(torch.autograd.Function):
    """Rows travel to other ranks; their gradients travel back."""

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
    """A router, and this rank's share of the experts. Every token goes to one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        # Every rank draws the weights of all experts, so that a model does not depend on where its experts are.
        experts = [nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)) for _ in range(EXPERTS)]
        share = EXPERTS // dist.get_world_size()
        self.first = dist.get_rank() * share
        self.experts = nn.ModuleList(experts[self.first : self.first + share])
        self.counts = torch.zeros(EXPERTS, dtype=torch.float64)
        """Tokens of this rank by expert, since they were last taken."""
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
        mine = loads[:, self.first : self.first + share]
        arrived = Exchange.apply(tokens[order], send, mine.sum(1).tolist())
        # From each rank come the rows of its tokens, by expert: the rows of one expert are put together.
        pieces = [rank.split(mine[index].tolist()) for index, rank in enumerate(arrived.split(mine.sum(1).tolist()))]
        done = [expert(torch.cat([rank[i] for rank in pieces])) for i, expert in enumerate(self.experts)]
        by_rank = [one.split(mine[:, index].tolist()) for index, one in enumerate(done)]
        leaving = torch.cat([one[rank] for rank in range(len(pieces)) for one in by_rank])
        returned = Exchange.apply(leaving, mine.sum(1).tolist(), send)
        return torch.empty_like(returned).index_copy(0, order, returned) * gates[:, None]


class Layer(nn.Module):
    """Causal attention, and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.moe_norm, self.moe = nn.LayerNorm(WIDTH), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + F.dropout(self.out(mixed), 0.1)  # draws from the default generator: it is in the boundary
        return x + self.moe(self.moe_norm(x).view(-1, WIDTH)).view_as(x)


class Model(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = [Layer() for _ in range(LAYERS)]
        self.layers = nn.ModuleList(self.blocks)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        if not x.requires_grad:  # frozen, in a replay; gradients must come to every rank's exchanges all the same
            x.requires_grad_()
        for layer in self.blocks:
            x = layer(x)
        return F.cross_entropy(self.head(x).view(-1, VOCABULARY), targets.reshape(-1))


def operators_of(model: Model) -> Iterator[tuple[str, ft.OperatorKind, list[nn.Parameter]]]:
    """The units that are saved and recovered, named by where they are in the model, and not on a rank."""
    yield "embedding", ft.OperatorKind.EMBEDDING, list(model.embedding.parameters())
    for number, layer in enumerate(model.blocks):
        moe = layer.moe
        for index, expert in enumerate(moe.experts):
            yield ft.expert_name(number, moe.first + index), ft.OperatorKind.EXPERT, list(expert.parameters())
        yield ft.gate_name(number), ft.OperatorKind.GATE, list(moe.router.parameters())
        rest = [one for part in (layer.norm, layer.qkv, layer.out, layer.moe_norm) for one in part.parameters()]
        yield ft.non_expert_name(number), ft.OperatorKind.NON_EXPERT, rest
    yield "head", ft.OperatorKind.HEAD, list(model.head.parameters())


# The trainer, as fault tolerance sees it


class Trainer(ft.Binding):
    """Model, optimizer and data of one rank.

    Args:
        seed: of weights, batches, and dropout.
    """

    def __init__(self, seed: int) -> None:
        if EXPERTS % dist.get_world_size():
            raise ft.ConfigError(f"--nproc {dist.get_world_size()}: {EXPERTS} experts; give a number that divides them")
        torch.manual_seed(seed)
        self.model = Model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        for parameter in self.model.parameters():  # as its first step would make it: snapshots hold it from the start
            self.optimizer.state[parameter] = {
                "step": torch.zeros(()), "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }  # fmt: skip
        self.gradients = {one: torch.zeros(one.numel()) for one in self.model.parameters()}
        """Gradients of the last update, which are logged where ``--moevement-recovery`` wants it."""
        self.parameters = {name: parameters for name, _, parameters in operators_of(self.model)}
        self.sparse = [one for layer in self.model.blocks for one in layer.moe.experts.parameters()]
        experts = {id(one) for one in self.sparse}
        self.dense = [one for one in self.model.parameters() if id(one) not in experts]
        self.corpus = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
        self.seed = seed
        torch.manual_seed(seed + 1 + dist.get_rank())  # ranks drop different values

    # A step, in the parts that a failure may come between

    def forward_backward(self, iteration: int) -> None:
        """Gradients of this rank's batch of ``iteration``, which is a pure function of its number."""
        draws = torch.Generator().manual_seed((self.seed * 1000 + iteration) * 1000 + dist.get_rank())
        starts = torch.randint(len(self.corpus) - LENGTH - 1, (BATCH,), generator=draws)
        text = torch.stack([self.corpus[start : start + LENGTH + 1] for start in starts])
        loss = self.model(text[:, :-1], text[:, 1:])
        loss.backward()
        self.losses[iteration] = {"lm loss": loss.detach()}

    def reduce(self) -> dict[str, Any]:
        """Mean gradients over ranks, and their norm; its reduction is the last one, and every rank takes part in it."""
        world = dist.get_world_size()
        # Frozen parameters keep their place: a sum over ranks may depend on where in the buffer a number is.
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
        """Clip by the norm that all ranks have, and step. Parameters without a gradient do not move."""
        scale = min(1.0, 1.0 / (outcome["norm"] + 1e-6))
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
                self.gradients[parameter].copy_(parameter.grad.view(-1))
        self.optimizer.step()
        self.optimizer.zero_grad()

    # What there is of this rank

    def place(self) -> ft.Place:
        return ft.Place(same_state=dist.get_rank(), step_spans_job=True)

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
        return {"rng": torch.get_rng_state(), "progress": {"iteration": self.iteration}}

    def put_boundary(self, boundary: Mapping[str, Any]) -> None:
        self.put_progress(boundary["progress"])
        torch.set_rng_state(boundary["rng"].clone())

    def put_progress(self, progress: Mapping[str, int]) -> None:
        self.iteration = progress["iteration"]

    def commit_point(self, vote: ft.Vote) -> ft.Commit:
        return ft.UpdateCommit(self, vote)

    def counts(self, table: ft.OperatorTable, ordering: ft.Ordering) -> ft.Counts:
        return RouterCounts(self.model, table)

    # After a failure

    def regroup(self) -> None:
        """Do nothing: all communication is in the default group, which nothing here refers to."""

    def build(self, shared: Any) -> bool:
        return True  # it was just made, as at the start of the job

    def clear_gradients(self) -> None:
        self.optimizer.zero_grad()

    def gradients_left(self) -> list[str]:
        return [name for name, one in self.model.named_parameters() if one.grad is not None]

    def complete(self) -> None:
        """Every rank has saved all of what it has."""

    @contextmanager
    def replaying(self, shared_from: int | None, alone: Any) -> Iterator[ft.Trainer]:
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
    """Iterations are run again, while some operators are frozen."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        tensors = (one for state in trainer.states().values() for one in (*state.compute, *state.full))
        self.live = {(one.operator, one.saved, one.key): one.tensor for one in tensors}

    def load(self, snapshot: ft.Snapshot, loads: Mapping[str, ft.Saved], *, is_shared: bool = True) -> None:
        for entry, tensor in snapshot.tensors_of(loads):
            self.live[entry.operator, entry.saved, entry.key].copy_(tensor)

    def redo(self, iteration: int, gradients: Mapping[str, Sequence[tuple[str, torch.Tensor]]], outcome: Any) -> None:
        """Logged gradients are clipped ones. Adam passes over what has none."""
        for name, its in gradients.items():
            for key, gradient in its:
                parameter = self.trainer.parameters[name][int(key)]
                parameter.grad = gradient.clone().view_as(parameter)
        self.trainer.optimizer.step()
        self.trainer.optimizer.zero_grad()

    def complete(self) -> None:
        self.trainer.complete()

    def put_boundary(self, boundary: Any) -> None:
        self.trainer.put_boundary(boundary)

    def freeze(self, iteration: int, frozen: frozenset[str]) -> None:
        for name, parameters in self.trainer.parameters.items():
            for parameter in parameters:
                parameter.requires_grad_(name not in frozen)

    def run(self, iteration: int, outcome: Mapping[str, Any] | None) -> Mapping[str, Any]:
        self.trainer.forward_backward(iteration)
        reduced = self.trainer.reduce()
        # The norm of then counted gradients that frozen operators do not have now.
        self.came_of = outcome["step"] if outcome is not None else reduced
        self.trainer.update(self.came_of)
        self.trainer.iteration = iteration
        return self.trainer.losses[iteration]

    def record(self) -> Mapping[str, Any]:
        return {"step": self.came_of}


class RouterCounts:
    """Tokens by expert, by which operators are ordered: the most popular ones are saved last."""

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
        """Tokens of a replay are not counted again."""
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
    masters = [one.tensor for one in state.full if one.key.endswith("/master")]
    moments = [one.tensor for one in state.full if not one.key.endswith("/master")]
    return [one.tensor for one in state.compute], masters, moments, [one.tensor for one in state.gradient]


# The loop


def main() -> None:
    """Train; everything that a failure interrupts is entered again in here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=60, metavar="N")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="keep metrics, events and a summary in this folder")
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

    ft.train(lambda: Trainer(args.seed), config, loop, backend="gloo", run_dir=args.run_dir, flags=vars(args))


if __name__ == "__main__":
    main()
