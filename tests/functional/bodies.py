"""Functions that ranks of functional tests run and whose results they send back; the fork server imports them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import torch.distributed as dist

from megatron.moevement.activate import process
from megatron.moevement.worker import run_rank


def _weights(wanted: Any) -> dict[str, np.ndarray]:
    return {
        name: param.detach().float().numpy().copy()
        for chunk in process().job.live.model or []
        for name, param in chunk.named_parameters()
        if wanted(name, param)
    }


def expert_weights_after_one_iteration(argv: list[str]) -> dict[str, np.ndarray]:
    run_rank(argv)
    return _weights(lambda name, param: "local_experts" in name)


def replicated_weights(argv: list[str]) -> dict[str, np.ndarray]:
    run_rank(argv)
    return _weights(lambda name, param: not getattr(param, "tensor_model_parallel", False))


def draws_by_tracker(argv: list[str]) -> dict[str, list[float]]:
    """Return a dropout mask drawn by each random tracker, after the same training on every rank."""
    import torch
    from megatron.core import tensor_parallel

    run_rank(argv)
    tracker = tensor_parallel.get_cuda_rng_tracker()
    draws = {}
    for name in tracker.get_states():
        with tracker.fork(name):
            draws[name] = torch.nn.functional.dropout(torch.ones(64), 0.5).tolist()
    return draws


def operators_held(argv: list[str]) -> dict[str, tuple[str, list[int]]]:
    """Return kind and tensor sizes of each operator of this rank; ``place``: its pipeline stage and expert rank."""
    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model

    from megatron.moevement.operators import operators_of_chunk

    run_rank(argv)
    held: dict[str, tuple[str, list[int]]] = {}
    for chunk in unwrap_model(process().job.live.model or []):
        for operator, _, parameter in operators_of_chunk(chunk, parallel_state.get_expert_model_parallel_rank()):
            held.setdefault(operator.name, (str(operator.kind), []))[1].append(parameter.numel())
    place = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_expert_model_parallel_rank()
    return held | {"place": ("", list(place))}


def state_weighed(argv: list[str]) -> dict[str, int]:
    """Return the bytes of this rank's operators, counted from live tensors, and its stage and index in the stage."""
    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model

    from megatron.moevement.optimizer.views import operator_views, operators_of

    run_rank(argv)
    live = process().job.live
    states = [
        operator.state
        for operator in operators_of(operator_views(unwrap_model(live.model or []), live.optimizer).states)
    ]
    stage = parallel_state.get_pipeline_model_parallel_rank()
    ranks = dist.get_world_size() // parallel_state.get_pipeline_model_parallel_world_size()
    weighed = {name: sum(getattr(state, name) for state in states) for name in ("compute", "full", "gradient")}
    return weighed | {"stage": stage, "rank": dist.get_rank() % ranks}


def live_and_saved(argv: list[str]) -> dict[str, Any]:
    """Train with sparse checkpoints; return digests of the live state in each iteration, and of all snapshots.

    ``live``: iteration -> tensor -> digest, of the whole state of every operator when the snapshot began.
    ``own`` and ``kept``: (rank, iteration) -> tensor -> digest, from the bytes of this rank's snapshots and of the
    copies that it keeps for peers.
    ``schedules``: iteration -> id of the schedule, what the snapshot has of each operator, and names of the operators.
    ``held``: names of this rank's operators.
    """
    from moevement_core.engine.checkpointer import Checkpointer
    from moevement_core.snapshot.snapshot import Snapshot, digest_of

    live: dict[int, dict[tuple[str, str], str]] = {}
    saved: dict[str, dict[tuple[int, int], dict[tuple[str, str], str]]] = {"own": {}, "kept": {}}
    schedules: dict[int, tuple[str, list[int], list[str]]] = {}

    def note(where: str, snapshots: Mapping[int, Snapshot]) -> None:
        for snapshot in snapshots.values():
            place = snapshot.header.rank, snapshot.iteration
            saved[where][place] = {
                (entry.operator, entry.key): digest_of(snapshot.bytes_of(entry)) for entry in snapshot.header.entries
            }

    def look(checkpointer: Checkpointer) -> None:
        note("own", checkpointer.own.snapshots)
        for store in checkpointer.replicator.stores:
            note("kept", store.snapshots())

    capture, wait = Checkpointer.capture, Checkpointer.wait

    def capture_and_note(self: Checkpointer, iteration: int, record: Any, **options: Any) -> None:
        look(self)
        live[iteration] = {
            (tensor.operator, tensor.key): digest_of(tensor.tensor.clone())
            for state in self.capturer._states.values()
            for tensor in (*state.compute, *state.full)
        }
        capture(self, iteration, record, **options)
        schedule = self.history.at(iteration)
        contents = self.history.contents(iteration)
        assert contents is not None
        schedules[iteration] = schedule.id, contents.tolist(), list(schedule.table.names)

    def wait_and_note(self: Checkpointer) -> float:
        look(self)
        return wait(self)

    Checkpointer.capture, Checkpointer.wait = capture_and_note, wait_and_note  # type: ignore[method-assign]
    try:
        run_rank(argv)
        checkpointer = process().job.session.saving.checkpointer  # type: ignore[union-attr]
        look(checkpointer)
    finally:
        Checkpointer.capture, Checkpointer.wait = capture, wait  # type: ignore[method-assign]
    return {"live": live, **saved, "schedules": schedules, "held": sorted(checkpointer.capturer._states)}


def one_killed_while_sending(argv: list[str], victim: int, iteration: int) -> dict[str, Any]:
    """Kill ``victim`` between the header and the payload of a snapshot; return what each other rank then holds."""
    import os
    import signal
    import time

    from moevement_core.replication.sender import Sender
    from moevement_core.snapshot.snapshot import Snapshot

    transfer = Sender._transfer

    def die_in_the_middle(self: Sender, snapshot: Snapshot) -> Any:
        if self.rank == victim and snapshot.iteration == iteration:
            original = self._transport.send

            def send(peer: int, tag: int, data: Any) -> None:
                if data.data_ptr() == snapshot.buffer.extents[0].memory.data_ptr():
                    os.kill(os.getpid(), signal.SIGKILL)
                original(peer, tag, data)

            self._transport.send = send  # type: ignore[method-assign]
        return transfer(self, snapshot)

    Sender._transfer = die_in_the_middle  # type: ignore[method-assign]
    failed = ""
    try:
        run_rank(argv)
    except (Exception, SystemExit) as error:
        failed = type(error).__name__
    time.sleep(1)  # let the background threads notice too
    checkpointer = process().job.session.saving.checkpointer  # type: ignore[union-attr]
    held = {**checkpointer.own.snapshots}
    kept = {store.source: store.snapshots() for store in checkpointer.replicator.stores}
    for snapshot in (*held.values(), *(s for snapshots in kept.values() for s in snapshots.values())):
        snapshot.check("after the death of a peer")
    return {
        "failed": failed,
        "persisted": checkpointer.progress.persisted,
        "own": sorted(held),
        "kept": {source: sorted(snapshots) for source, snapshots in kept.items()},
    }


def work_of_frozen_operators(argv: list[str]) -> dict[str, dict[str, Any]]:
    """Train, then run forward and backward of one micro-batch with different operators frozen.

    Return for each case the number of matrix products, the parameters whose gradient autograd accumulated, and the sum
    of absolute gradients of each operator.
    """
    import torch
    from megatron.core.utils import unwrap_model

    from megatron.moevement.data.batches import train_batches_from
    from megatron.moevement.transformer.frozen import FrozenMode

    run_rank(argv)
    job = process().job
    assert job.session is not None
    assert job.live.loop is not None
    assert job.live.model is not None
    trained = job.binding.views.trained
    chunk = job.live.model[0]
    all_operators = frozenset(trained)
    cases = {"nothing": frozenset[str](), "everything": all_operators, "one expert": frozenset({"layers.1.experts.2"})}
    cases |= {
        kind: frozenset(name for name in all_operators if name.endswith(kind)) for kind in ("gate", "non_expert")
    } | {"experts": frozenset(name for name in all_operators if ".experts." in name)}
    cases |= {name: frozenset({name}) for name in ("embedding", "head")}
    mode, results = FrozenMode(unwrap_model(job.live.model), trained), {}
    for case, frozen in cases.items():
        chunk.zero_grad_buffer()
        mode.freeze(frozen)
        mode.begin()
        accumulated: list[str] = []
        hooks = [
            part.parameter.register_post_accumulate_grad_hook(lambda _, name=name, to=accumulated: to.append(name))
            for name, parts in trained.items()
            for part in parts
            if part.parameter.requires_grad
        ]
        (batches, *_) = train_batches_from(job.live, 0)
        with torch.random.fork_rng(), _Products() as products:
            output, _ = job.live.loop.forward_step_func(batches, chunk)
            output.float().sum().backward()
        for hook in hooks:
            hook.remove()
        mode.end()
        norms = {
            name: sum(float(getattr(part.parameter, "main_grad").abs().sum()) for part in parts)  # noqa: B009
            for name, parts in trained.items()
        }
        results[case] = {
            "products": products.count,
            "accumulated": sorted(accumulated),
            "gradients": norms,
            "frozen": sorted(frozen),
        }
    return results


class _Products:
    """Counter of matrix products, whichever code computes them."""

    def __init__(self) -> None:
        from torch.utils._python_dispatch import TorchDispatchMode

        outer = self

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                outer.count += func.overloadpacket.__name__ in ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul")
                return func(*args, **(kwargs or {}))

        self.count = 0
        self._mode = Mode()

    def __enter__(self) -> _Products:
        self._mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)


def wiped_with_damaged_snapshots(argv: list[str], victim: int) -> None:
    """Train; after each wipe of the state, flip a bit in each of the snapshots that ``victim`` took itself."""
    from megatron.moevement.binding import MegatronBinding

    original = MegatronBinding.wipe

    def wipe_and_damage(self: MegatronBinding) -> None:
        original(self)
        session = process().job.session
        assert session is not None
        if session.saving.topology.rank == victim:
            for snapshot in session.saving.checkpointer.own.snapshots.values():
                entry = snapshot.header.entries[0]
                snapshot.bytes_of(entry)[entry.nbytes // 2] ^= 4

    with patch.object(MegatronBinding, "wipe", wipe_and_damage):
        run_rank(argv)


def wiped_with_a_damaged_log(argv: list[str], victim: int) -> None:
    """Train; before ranks plan a recovery, flip a bit of a sent tensor in the boundary log of ``victim``."""
    from moevement_core.recovery.boundary_log import Direction
    from moevement_core.session.recoverer import Recoverer

    original = Recoverer.prepare

    def damage_and_prepare(self: Recoverer, until: int, lost: Any) -> Any:
        parts = self._saving.parts
        log = parts.binding.boundary_log
        if parts.topology.rank == victim and log is not None:
            (first, *_) = log.sent(until, Direction.FORWARD) or []
            assert first.digest, "it was made when the tensor was sent"
            first.buffer[3] ^= 8
        return original(self, until, lost)

    with patch.object(Recoverer, "prepare", damage_and_prepare):
        run_rank(argv)


def with_shapes_exchanged(argv: list[str]) -> None:
    """Train as with sequences of variable lengths: stages send each other the shape of every tensor first.

    Megatron has no flag for this; trainers with such data set it in their configuration.
    """
    from megatron.core.pipeline_parallel import p2p_communication

    original = p2p_communication.P2PCommunicator.__init__

    def init(self: Any, pp_group: Any, config: Any) -> None:
        config.variable_seq_lengths = True
        original(self, pp_group, config)

    kind = p2p_communication.P2PCommunicator
    shapes = Mock(side_effect=kind._communicate_shapes)
    exchange = patch.object(kind, "_communicate_shapes", lambda *args, **kwargs: shapes(*args, **kwargs))
    with patch.object(kind, "__init__", init), exchange:
        run_rank(argv)
    assert shapes.called


def spoiled_and_cleared(argv: list[str]) -> dict[str, Any]:
    """Train, leave all state that an exception in a step can leave, clear it, and return what is still there."""
    import torch
    from megatron.core import tensor_parallel

    from megatron.moevement.optimizer.committed import CommittedOptimizer
    from megatron.moevement.optimizer.modes import Replay, Train
    from megatron.moevement.restart import leftovers

    run_rank(argv)
    job = process().job
    assert job.live.model is not None
    assert job.session is not None
    assert job.live.boundary_log is None
    (chunk,) = job.live.model
    groups = [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]
    for parameter in chunk.parameters():
        parameter.grad = torch.ones_like(parameter)
        parameter.main_grad.fill_(3)
        parameter.grad_added_to_main_grad = True
    for member in job.live.optimizer.chained_optimizers:
        for group in member.optimizer.param_groups:
            for master in group["params"]:
                master.grad = torch.ones_like(master)
        member._defer_param_sync = True
    left = leftovers.gradients(job.live)
    for group in groups:
        group.per_param_grad_ready_counts = {next(iter(group.params)): 1}
        group.is_last_microbatch, group.param_gather_dispatched = False, True
        group.param_gather_handle = group.grad_reduce_handle = "aborted"
    hooks = chunk.remove_forward_pre_hook_handles
    for module in list(hooks)[::2]:
        hooks.pop(module).remove()
    chunk.eval()
    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker._current_state_name = "model-parallel-rng"
    commit = job.session.commit
    assert isinstance(commit, CommittedOptimizer)
    commit._section = "open"  # type: ignore[assignment]
    commit.mode = Replay(job.live.optimizer, {})
    counts = job.session.saving.windows._counts
    assert counts is not None
    counts.paused = True
    torch.set_grad_enabled(False)
    torch.autocast("cpu").__enter__()
    torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor).__enter__()
    leftovers.clear_thread()
    job.session.interrupted()
    leftovers.clear(job.live, dict.fromkeys(leftovers._CONFIG))
    still_there = leftovers.gradients(job.live)
    leftovers.clear_gradients(job.live)
    assert commit._section is None
    assert type(commit.mode) is Train
    return {
        "left": left,
        "still_there": still_there,
        "names": [name for name, _ in chunk.named_parameters()],
        "after": leftovers.gradients(job.live),
        "masters": sum(
            master.grad is not None
            for member in job.live.optimizer.chained_optimizers
            for group in member.optimizer.param_groups
            for master in group["params"]
        ),
        "thread": (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), _hooks_of_saved_tensors()),
        "switches": (
            counts.paused, tracker._current_state_name,
            any(member._defer_param_sync for member in job.live.optimizer.chained_optimizers), chunk.training,
        ),
        "groups": [
            (g.per_param_grad_ready_counts, g.is_last_microbatch, g.param_gather_dispatched, g.param_gather_handle,
             g.grad_reduce_handle)
            for g in groups
        ],
        "hooks": [len(module._forward_pre_hooks) for module in chunk.module.modules()],
    }  # fmt: skip


def clipped_as_with_transformer_engine(argv: list[str]) -> None:
    """Train with norms that are FP32 tensors, and clip in FP32 arithmetic, as Transformer Engine does."""
    from megatron.core.optimizer import clip_grads

    def scale(chunk: int, overflow: Any, tensors: list[list[Any]], coefficient: Any) -> None:
        for source, target in zip(*tensors, strict=True):
            target.copy_(source * coefficient)

    with patch.object(clip_grads, "multi_tensor_scale_tensor_impl", scale):
        run_rank(argv)


def _hooks_of_saved_tensors() -> bool:
    import torch

    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def with_peers_that_keep_nothing(argv: list[str]) -> None:
    """Train with peers that reserve memory for copies and never acknowledge one."""
    import time

    from moevement_core.replication.receiver import Receiver

    def silent(self: Receiver, message: Any) -> None:
        time.sleep(1000)

    Receiver._receive = silent  # type: ignore[method-assign]
    run_rank(argv)


def tokens_by_iteration(argv: list[str]) -> dict[tuple[int, int, int], int]:
    """Return the number of tokens that this rank's routers sent to each expert, by iteration, layer and expert.

    The counts come from the output of Megatron's routers, not from the product's own counters.
    """
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.training import get_args

    counted: dict[tuple[int, int, int], int] = {}
    forward = TopKRouter.forward

    def counting(router: Any, *args: Any, **kwargs: Any) -> Any:
        probabilities, routing = forward(router, *args, **kwargs)
        if router.training:
            for expert, count in enumerate(routing.reshape(-1, routing.shape[-1]).sum(0).tolist()):
                key = (int(get_args().curr_iteration) + 1, int(router.layer_number) - 1, expert)
                counted[key] = counted.get(key, 0) + int(count)
        return probabilities, routing

    with patch.object(TopKRouter, "forward", counting):
        run_rank(argv)
    return counted
