"""Binding for a model in plain torch, an ``nn.Module``, with an optimizer of torch.

The model is replicated: each rank holds all parameters, or all except parameters that only one rank holds, such as the
experts of expert parallelism. The binding averages gradients over the ranks itself, so the model is not wrapped in
``DistributedDataParallel``. Or ``fully_shard`` has sharded modules, and FSDP averages their gradients; on a mesh of two
dimensions (HSDP), several ranks hold each shard.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, override

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

from moevement_core.audit.evidence import AuditedModel
from moevement_core.engine.layout import OperatorState, in_order
from moevement_core.errors import ConfigError
from moevement_core.operators import Operator, OperatorTable, StateBytes
from moevement_core.policy.popularity import Ordering
from moevement_core.policy.schedule import Saved
from moevement_core.snapshot.snapshot import StateTensor
from moevement_core.snapshot.whole import begin_whole
from moevement_core.trainer.batches import Batches, StatefulLoader
from moevement_core.trainer.binding import Binding, SupportsRedo
from moevement_core.trainer.capabilities import (
    Counts,
    Replicas,
    SupportsAudit,
    SupportsCounts,
    SupportsGradientChecks,
    SupportsLiveReplicas,
    SupportsRecoveryHook,
    SupportsRegroup,
    SupportsReplicaDigests,
    SupportsSkips,
    SupportsWipe,
)
from moevement_core.trainer.first_state import make_state
from moevement_core.trainer.fsdp import (
    ShardedRows,
    begin_sharding,
    forget_pass,
    holders,
    like_shard,
    refuse_other_rows,
    refuse_other_shards,
    shard_of,
    use_new_groups,
)
from moevement_core.trainer.interface import Place
from moevement_core.trainer.module_operators import OperatorParts, operators_of, refuse_models, refuse_unnamed
from moevement_core.trainer.recut import Recut
from moevement_core.trainer.token_counts import TokenCounts

BUCKET = 1 << 23
"""Approximate number of gradient elements that ranks average in one collective."""
SEEDS = 1 << 62
"""Number of seeds of random numbers."""
FIRST_UPDATES = 3
"""Number of the updates at the start, and after a failure, before which ranks compare their weights.

The first update after a failure uses the learning rate of the snapshot, the second one a rate that the script has set,
and the third comparison sees the difference.
"""
NO_NUMBER = -(1 << 62)
"""Number that is smaller than every digest and every negated digest."""


class TorchBinding(
    Binding,
    SupportsCounts,
    SupportsSkips,
    SupportsRegroup,
    SupportsGradientChecks,
    SupportsReplicaDigests,
    SupportsLiveReplicas,
    SupportsRedo,
    SupportsRecoveryHook,
    SupportsAudit,
    SupportsWipe,
):
    """Binding of one rank of a job that trains an ``nn.Module``, replicated or sharded by ``fully_shard`` (FSDP2).

    The constructor makes no collective, because a replacement calls it alone. All ranks must build equal weights, for
    example after ``torch.manual_seed``; the first update checks this.

    Args:
        model: the model, on its device, not wrapped in ``DistributedDataParallel``. ``fully_shard`` may have sharded
            it, or modules in it, over all ranks, or on a mesh of all ranks with several copies of each shard (HSDP).
        optimizer: optimizer of torch with the model's parameters, or several with a part of them each, such as Muon for
            matrices and AdamW for the rest. If one has no state yet, the constructor creates that state as the first
            step would.
        compute_gradients: function that computes the gradients of this rank's share of the batch of an iteration, and
            returns the loss, or losses by name. Its arguments are the iteration's number, on which the batch depends
            alone, and with ``loader`` also the batch.
        operators: operators of this rank; None: each element of the model's outermost ``nn.ModuleList`` is an operator,
            and so are the embeddings and the rest. Names must not depend on the rank.
        local: parameters that no other rank holds, such as those of this rank's experts.
        counts: counters to which the model's routers add; None to order operators without popularity.
        clip_norm: largest norm of the gradients of all ranks together; None to leave gradients as they are.
        scheduler: schedule of the learning rate, an ``LRScheduler`` of the optimizer, or several; the binding steps
            them.
        loader: loader of this rank's batches with ``state_dict`` and ``load_state_dict``, one batch for each iteration.
            Snapshots hold its state, so a replay draws the same batches again. Each rank may have other batches; a
            lost rank is therefore restored from its snapshots. Not for elastic jobs.
        extra: objects with ``state_dict`` and ``load_state_dict`` that an update changes in addition, such as a moving
            average of the weights. A step post hook of the optimizer may change them, and nothing outside of
            ``compute_gradients`` and the optimizer's step. Each snapshot holds their whole state, and a rank may get it
            from another one, so it must be equal on ranks with equal weights.
        seed: seed of the random numbers, which each rank draws anew in each iteration.

    Raises:
        ConfigError: the model or the optimizer is of a kind that this class does not handle.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        compute_gradients: Callable[..., torch.Tensor | Mapping[str, torch.Tensor]],
        *,
        operators: Iterable[OperatorParts] | None = None,
        local: Iterable[nn.Parameter] = (),
        counts: TokenCounts | None = None,
        clip_norm: float | None = None,
        scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
        loader: StatefulLoader | None = None,
        extra: Iterable[Stateful] = (),
        seed: int = 0,
    ) -> None:
        refuse_models(model)
        refuse_other_shards(model)
        begin_sharding(model)
        self.model = model
        self._optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        self._schedulers = [scheduler] if isinstance(scheduler, LRScheduler) else list(scheduler or ())
        self._compute_gradients, self._clip_norm, self._seed = compute_gradients, clip_norm, seed
        self._counts = counts
        self._batches = None if loader is None else Batches(loader)
        self._parts = [
            (name, kind, list(parameters))
            for name, kind, parameters in (operators_of(model) if operators is None else operators)
        ]
        held = [parameter for group in self._groups() for parameter in group["params"]]
        refuse_unnamed(model, held, self._parts)
        self._trained = trained = [parameter for parameter in held if parameter.requires_grad]
        self._extra = list(extra)
        before = [copy.deepcopy(each.state_dict()) for each in self._extra]
        for each in self._optimizers:
            make_state(each)
        for changed, state in zip(self._extra, before, strict=True):  # Hooks of the optimizer may have changed it.
            changed.load_state_dict(state)
        is_local = {id(parameter) for parameter in local}
        self._local = [parameter for parameter in trained if id(parameter) in is_local]
        self._sharded = [parameter for parameter in trained if isinstance(parameter, DTensor)]
        others = is_local | {id(parameter) for parameter in self._sharded}
        self._buckets = list(_buckets(parameter for parameter in trained if id(parameter) not in others))
        self._shards: dict[frozenset[int], list[torch.Tensor]] = defaultdict(list)
        """Sharded parameters by the ranks that hold the same shards as this rank."""
        for parameter in self._sharded:
            self._shards[holders(parameter)].append(parameter)
        self._logged = {id(parameter): torch.zeros_like(shard_of(parameter.detach())).view(-1) for parameter in trained}
        """Gradients of the last update by the parameter's id, for redo."""
        self._left_out = frozenset[int]()
        self._with_buffers = [
            each for each in model.named_modules() if any(True for _ in each[1].buffers(recurse=False))
        ]
        self._frozen = frozenset[int]()
        """Ids of the parameters that keep their values in the iteration of a replay."""
        self._comparisons = 0
        """Number of the next reductions before which ranks compare their weights."""

    # An iteration

    @override
    def run(self, iteration: int, frozen: frozenset[str] = frozenset()) -> None:
        """Compute the gradients of an iteration; the loop calls it before ``session.step``.

        Random numbers are a function of the binding's seed, the iteration and the rank.

        Gradients of frozen operators are computed as well, and dropped. Without them a pass would be shorter, but
        torch's operations may take another way then, with other bits: ``linear`` does, if its input is not contiguous.
        """
        rank, world = dist.get_rank(), dist.get_world_size()
        idle = [each for name, _, parameters in self._parts if name in frozen for each in parameters]
        self._frozen = frozenset(map(id, idle))
        self.model.zero_grad()
        seed = ((self._seed * 1_000_003 + iteration) * world + rank) % SEEDS
        torch.manual_seed(seed)
        batch = () if self._batches is None else (self._batches.batch(iteration),)
        torch.manual_seed(seed)  # whatever the loader has drawn, or has dropped after a left-out iteration
        losses = self._compute_gradients(iteration, *batch)
        for parameter in idle:
            parameter.grad = None
        named = losses if isinstance(losses, Mapping) else {"loss": losses}
        self.losses[iteration] = {name: loss.detach() for name, loss in named.items()}

    @override
    def reduce(self) -> dict[str, Any]:
        """Average gradients and losses over ranks; return losses, learning rate, and the norm if it is limited."""
        world, squares = dist.get_world_size(), torch.zeros(())
        if self.iteration < FIRST_UPDATES or self._comparisons:
            self._comparisons = max(0, self._comparisons - 1)
            self._refuse_other_weights()
        for parameter in self._trained:  # A rank may have used a parameter that another rank has not.
            if id(parameter) not in self._frozen and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for bucket in self._buckets:
            # Parameters without a gradient stay in the bucket: the bits of a sum may depend on the position in it.
            flat = torch.cat([
                torch.zeros_like(parameter).view(-1) if parameter.grad is None else parameter.grad.reshape(-1)
                for parameter in bucket
            ]).div_(world)  # fmt: skip
            dist.all_reduce(flat)
            squares = squares + flat.float().square().sum().cpu() if self._clip_norm is not None else squares
            for parameter, mean in zip(bucket, flat.split([each.numel() for each in bucket]), strict=True):
                if parameter.grad is not None:
                    parameter.grad.copy_(mean.view_as(parameter))
        own = [
            parameter.grad.div_(world).float().square().sum().cpu()
            for parameter in self._local if parameter.grad is not None
        ]  # fmt: skip
        # FSDP has averaged these in the backward pass. Each holder of a shard adds its part of the squares.
        own += [
            shard_of(parameter.grad).float().square().sum().cpu() / len(ranks)
            for ranks, shards in self._shards.items() for parameter in shards if parameter.grad is not None
        ]  # fmt: skip
        losses = self.losses[self.iteration + 1]
        sums = torch.stack([
            sum(own, torch.zeros(())),
            *(loss.float().cpu() for loss in losses.values()),
        ]).to(self._device)  # fmt: skip
        dist.all_reduce(sums)
        of_local, *of_losses = sums.tolist()
        outcome = {
            "losses": {name: total / world for name, total in zip(losses, of_losses, strict=True)},
            "learning_rate": float(next(self._groups())["lr"]),
        }
        self._note_losses(self.iteration + 1, outcome)
        if self._clip_norm is None:
            return outcome
        return {"norm": math.sqrt(float(squares) + of_local), **outcome}

    def _refuse_other_weights(self) -> None:
        """Refuse to train on if weights differ that the ranks have built, or have updated since a failure.

        Raises:
            ConfigError: a rank has other weights. Every rank raises it.
        """
        for _, ranks, digest in self.replicas():
            number = int(hashlib.sha256(digest.encode()).hexdigest()[:15], 16)
            # For each group of ranks with equal weights: their largest number, and the smallest, negated.
            bounds = torch.full((2, dist.get_world_size()), NO_NUMBER, device=self._device)
            bounds[:, min(ranks)] = torch.tensor([number, -number])
            dist.all_reduce(bounds, dist.ReduceOp.MAX)
            if not bool((bounds.sum(0) > 0).any()):
                continue
            if self.iteration == 0:
                raise ConfigError(
                    "the ranks have built different weights; call torch.manual_seed with the same number on all of "
                    "them before you make the model"
                )
            raise ConfigError(
                f"the ranks have different weights after the update of iteration {self.iteration}; an update must not "
                "depend on the rank, and a replacement needs everything that it depends on: give TorchBinding the "
                "learning rate's schedule as scheduler, and other state as extra"
            )

    @override
    def update(self, outcome: Mapping[str, Any]) -> None:
        """Clip gradients, and make the steps of optimizer and schedule."""
        scale = 1.0 if self._clip_norm is None else min(1.0, self._clip_norm / (outcome["norm"] + 1e-6))
        for group in self._groups():
            for parameter in group["params"]:
                if parameter.grad is not None:
                    if scale != 1.0:
                        parameter.grad.mul_(scale)
                    self._logged[id(parameter)].copy_(shard_of(parameter.grad).reshape(-1))
        self._note_step(self.iteration + 1, outcome)
        self._step()

    def _note_losses(self, iteration: int, outcome: Mapping[str, Any]) -> None:
        self.losses[iteration] = {name: torch.tensor(loss) for name, loss in outcome["losses"].items()}

    def _note_step(self, iteration: int, outcome: Mapping[str, Any]) -> None:
        """Add the step's learning rate and norm of gradients to the losses, for the metrics."""
        figures = {
            name: torch.tensor(outcome[key], dtype=torch.float64)
            for name, key in (("grad_norm", "norm"), ("learning_rate", "learning_rate")) if key in outcome
        }  # fmt: skip
        losses = self.losses.get(iteration, {})
        # Losses come first, and keep their values: a script's own loss may have one of these names.
        self.losses[iteration] = {**losses, **figures, **losses}

    @override
    def on_recovered(self, until: int, outcome: Mapping[str, Any], *, is_between: bool) -> None:
        if "losses" in outcome:  # A replacement that took over newer state has not computed them.
            self._note_losses(until, outcome)
            self._note_step(until, outcome)
        self._comparisons = FIRST_UPDATES

    def _step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()
        for scheduler in self._schedulers:
            scheduler.step()
        self.model.zero_grad()  # also of parameters that the optimizer does not have

    # State

    def _groups(self) -> Iterator[dict[str, Any]]:
        """Yield the groups of parameters of all optimizers."""
        for optimizer in self._optimizers:
            yield from optimizer.param_groups

    def _state_of(self, parameter: nn.Parameter) -> Mapping[str, Any]:
        """Return what the optimizer of ``parameter`` keeps for it; empty if no optimizer has it."""
        return next((each.state[parameter] for each in self._optimizers if parameter in each.state), {})

    @property
    def _device(self) -> torch.device:
        return self._parts[0][2][0].device

    @override
    def place(self) -> Place:
        return Place(same_state=dist.get_rank() if self._local else 0)

    @override
    def operators(self) -> Sequence[Operator]:
        states = self.states()
        return [Operator(name, kind, _bytes(states[name])) for name, kind, _ in self._parts]

    @override
    def states(self) -> Mapping[str, OperatorState]:
        states = {}
        for name, _, parameters in self._parts:
            compute, full, gradients = [], [], []
            for number, parameter in enumerate(parameters):
                weight = shard_of(parameter.data).view(-1)
                compute.append(StateTensor(name, Saved.COMPUTE, f"{number}/weight", weight))
                tensors = {"weight": weight, **_tensors(self._state_of(parameter))}
                full += [
                    StateTensor(name, Saved.FULL, f"{number}/{what}", tensor.view(-1))
                    for what, tensor in tensors.items()
                ]
                if id(parameter) in self._logged:
                    gradients.append(StateTensor(name, Saved.GRADIENT, f"{number}", self._logged[id(parameter)]))
            states[name] = OperatorState(tuple(compute), tuple(full), tuple(gradients))
        return states

    @override
    def boundary(self) -> dict[str, Any]:
        groups = [{name: value for name, value in group.items() if name != "params"} for group in self._groups()]
        return {
            "groups": groups, "schedules": [each.state_dict() for each in self._schedulers],
            "buffers": dict(self._buffers()),
            "progress": {"iteration": self.iteration},
            "extra": [dict(each.state_dict()) for each in self._extra],
            **({} if self._batches is None else {"loader": self._batches.state()}),
        }  # fmt: skip

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buffers that a ``state_dict`` has. Others follow from the construction of the model.

        ``state_dict`` itself may communicate, because modules add hooks to it.
        """
        for prefix, module in self._with_buffers:
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    yield f"{prefix}.{name}", buffer

    @override
    def put_boundary(self, boundary: Mapping[str, Any]) -> None:
        self.put_progress(boundary["progress"])
        for group, saved in zip(self._groups(), boundary["groups"], strict=True):
            group.update(saved)
        for scheduler, saved in zip(self._schedulers, boundary["schedules"], strict=True):
            scheduler.load_state_dict(dict(saved))
        for name, buffer in self._buffers():
            buffer.copy_(boundary["buffers"][name])
        for each, state in zip(self._extra, boundary["extra"], strict=True):
            each.load_state_dict(copy.deepcopy(dict(state)))  # The object may keep these tensors, and change them.
        if self._batches is not None:
            self._batches.restore(boundary["loader"])

    @override
    def counts(self, table: OperatorTable, ordering: Ordering) -> Counts | None:
        return None if self._counts is None else self._counts.of_table(table)

    @override
    def settings(self) -> dict[str, Any]:
        return {
            "world_size": dist.get_world_size(), "seed": self._seed,
            "optimizer": "+".join(type(each).__name__ for each in self._optimizers),
            "iterations_to_skip": sorted(self._left_out),
        }  # fmt: skip

    @override
    def iterations_left_out(self) -> Collection[int]:
        return self._left_out

    @override
    def leave_out(self, iterations: Collection[int]) -> None:
        self._left_out |= set(iterations)

    # After a failure

    @override
    def regroup(self) -> None:
        use_new_groups(self.model)
        self._comparisons = 0  # as on a replacement

    @override
    def clear_gradients(self) -> None:
        forget_pass(self.model)
        self.model.zero_grad()

    @override
    def gradients_left(self) -> list[str]:
        return [name for name, parameter in self.model.named_parameters() if parameter.grad is not None]

    @override
    def replicas(self) -> list[Replicas]:
        weights: dict[frozenset[int], list[torch.Tensor]] = defaultdict(list)
        weights[frozenset(range(dist.get_world_size()))] += (each for bucket in self._buckets for each in bucket)
        for ranks, shards in self._shards.items():
            weights[ranks] += shards
        return [
            ("", tuple(sorted(ranks)), begin_whole({"": [shard_of(each.data) for each in parameters]})()[""])
            for ranks, parameters in weights.items() if parameters and len(ranks) > 1
        ]  # fmt: skip

    @override
    def audited(self) -> AuditedModel:
        operators = {name: parameters for name, _, parameters in self._parts}
        return AuditedModel([self.model], operators, lambda parameter: parameter.grad)

    @override
    def live_replicas(self) -> set[int]:
        if self._local or dict(self._buffers()) or self._batches is not None:
            return set()
        everyone = frozenset(range(dist.get_world_size()))
        return set(everyone.intersection(*self._shards)) - {dist.get_rank()}

    @override
    def states_of_replica(self, rank: int) -> Mapping[str, OperatorState]:
        return self.states()

    @override
    def gather_replicas(self) -> None:
        """Do nothing: every rank saves all the state that it holds."""

    @override
    def redo(self, gradients: Mapping[str, Sequence[tuple[str, torch.Tensor]]], outcome: Mapping[str, Any]) -> None:
        """Repeat an update from logged gradients, which are averaged and clipped already."""
        parameters = {name: parameters for name, _, parameters in self._parts}
        for name, logged in gradients.items():
            for key, gradient in logged:
                parameter = parameters[name][int(key)]
                parameter.grad = like_shard(gradient.to(parameter.device, copy=True), parameter)
        self._step()

    @override
    def recut(self) -> Recut:
        if self._batches is not None:
            raise ConfigError(
                "loader in an elastic job: the state of a loader is of one rank, and cannot be divided among others; "
                "let the batch depend on the iteration's number, and leave loader out"
            )
        refuse_other_rows(self._sharded)
        shapes: dict[tuple[str, str], tuple[int, int]] = {}
        for name, _, parameters in self._parts:
            for number, parameter in enumerate(parameters):
                if isinstance(parameter, DTensor):
                    state = self._state_of(parameter)
                    sharded = ["weight", *(what for what, value in state.items() if isinstance(value, DTensor))]
                    shape = parameter.shape[0], parameter.shape[1:].numel()
                    shapes |= {(name, key): shape for key in (f"{number}", *(f"{number}/{what}" for what in sharded))}
        return ShardedRows(self.states, self.losses, shapes)

    @override
    def wipe(self) -> None:
        for state in self.states().values():
            for entry in state.full:
                entry.tensor.fill_(float("nan") if entry.tensor.is_floating_point() else 0)


def _tensors(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: shard_of(value) for name, value in in_order(state).items() if isinstance(value, torch.Tensor)}


def _buckets(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield groups of parameters of one type, each of about :data:`BUCKET` elements, in the same order on all ranks."""
    bucket = list[nn.Parameter]()
    for parameter in parameters:
        is_full = sum(each.numel() for each in bucket) + parameter.numel() > BUCKET
        if bucket and (is_full or bucket[0].dtype != parameter.dtype):
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket


def _bytes(state: OperatorState) -> StateBytes:
    masters = [entry.tensor for entry in state.full if entry.key.endswith("/weight")]
    others = [entry.tensor for entry in state.full if not entry.key.endswith("/weight")]
    return StateBytes.of_tensors(
        [entry.tensor for entry in state.compute], masters, others, [entry.tensor for entry in state.gradient]
    )
