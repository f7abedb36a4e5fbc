"""Execution of a replay's iterations on a rank, by Megatron's ``train_step`` and on the original batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, override

import torch
import torch.distributed as dist

from megatron.moevement.data.batches import train_batches_from
from megatron.moevement.fp8.delayed import remaking
from megatron.moevement.optimizer.committed import CommittedOptimizer
from megatron.moevement.optimizer.modes import RedoUpdates, Replay
from megatron.moevement.optimizer.per_token import divide_gradients
from megatron.moevement.optimizer.restore import Restore
from megatron.moevement.optimizer.scales import Scales
from megatron.moevement.optimizer.views import OperatorViews
from megatron.moevement.optimizer.weights import gathers_by_gradients
from megatron.moevement.runtime.boundary import put_boundary_state, put_progress, put_schedule
from megatron.moevement.runtime.ledger import Ledger
from megatron.moevement.runtime.live import Live
from megatron.moevement.state_digest import layer_wise, members, progress
from megatron.moevement.transformer.frozen import FrozenMode
from moevement_core.operators import EMBEDDING
from moevement_core.policy.schedule import Saved
from moevement_core.recovery.feed import Feeding
from moevement_core.recovery.replay import Trainer
from moevement_core.snapshot.snapshot import Snapshot
from moevement_core.util.undo import UndoStack


class MegatronTrainer(Trainer):
    """Trainer of one rank in a replay, for use inside :meth:`replaying`.

    Args:
        live: Megatron's objects on this rank.
        ledger: ledger that gets the metrics line of every replayed iteration.
        views: views of this rank's operators.
        commit: commit point of this rank's optimizer; during the replay, it repeats steps and commits nothing new.
        shared_from: first iteration in which a copy of a tied embedding is active on any stage; None if there are no
            copies. From this iteration on, frozen copies also compute gradients, because the gradient of the active
            copy is a sum over all copies.
        feeding: tensors from the boundary logs of stages that keep their state; None if all stages replay.
    """

    def __init__(
        self,
        live: Live,
        ledger: Ledger,
        views: OperatorViews,
        commit: CommittedOptimizer,
        shared_from: int | None,
        feeding: Feeding | None = None,
    ) -> None:
        from megatron.core.utils import unwrap_model

        assert live.loop is not None, "recovery begins inside Megatron's train()"
        assert live.model is not None
        self._live, self._ledger = live, ledger
        self._loop = live.loop
        self._chunks = live.model
        self._mode = FrozenMode(unwrap_model(live.model), views.trained)
        self._commit = commit
        self._views = views
        self._step = Replay(live.optimizer, views.trained)
        self._gradients = {tensor.key: tensor.tensor for state in views.states.values() for tensor in state.gradient}
        self._restored: tuple[int, Mapping[str, Any]] | None = None
        """Last iteration that a redo repeated, with its record; None once the ledger has the iteration's metrics.

        The metrics need the boundary state after the iteration, which is restored later.
        """
        self._record: Mapping[str, Any] = {}
        self._single: Any = None
        self._restore = Restore(live.model, live.optimizer, views)
        self._shared_from = shared_from
        self._feeding = feeding
        self._batches: Any = None
        self._batches_at = -1

    # Methods that the state machine of a replay calls

    @override
    def load(self, snapshot: Snapshot, loads: Mapping[str, Saved], *, is_shared: bool = True) -> None:
        with remaking():
            self._restore.load(snapshot, loads, is_shared=is_shared)

    @override
    def before_load(self, boundary: Any) -> None:
        Scales(self._live.model or []).put(boundary)

    @override
    def put_boundary(self, boundary: Any) -> None:
        put_boundary_state(self._live, boundary)
        if self._restored is not None:
            iteration, record = self._restored
            self._restored = None
            if "losses" in record:  # The losses are missing if the rank was interrupted before the iteration was over.
                self._ledger.replayed(iteration, record["losses"], record["skipped"], record["grad_norm"])

    @override
    def redo(self, iteration: int, gradients: Mapping[str, Sequence[tuple[str, torch.Tensor]]], outcome: Any) -> None:
        logged = [(self._gradients[key], tensor) for tensors in gradients.values() for key, tensor in tensors]

        def put() -> None:
            for live, tensor in logged:
                live.copy_(tensor)

        mode = RedoUpdates(self._live.optimizer, self._views.trained, put)
        mode.frozen = frozenset(self._views.trained) - gradients.keys()
        mode.outcome = outcome["step"]
        with self._live.undo.nested() as undo:
            self._without_reductions(undo)
            self._commit.redo(mode)
        self._restored = iteration, outcome

    @property
    @override
    def gradients_stay(self) -> bool:
        return not any(map(gathers_by_gradients, members(self._live.optimizer)))

    @override
    def gather_replicas(self) -> None:
        with remaking():
            self._restore.gather_replicas()

    @override
    def freeze(self, iteration: int, frozen: frozenset[str]) -> None:
        self._step.frozen = frozen
        shared = self._shared_from is not None and iteration >= self._shared_from
        self._mode.freeze(frozen - {EMBEDDING} if shared else frozen)

    @override
    def run(self, iteration: int, outcome: Mapping[str, Any] | None) -> Mapping[str, Any]:
        from megatron.core.num_microbatches_calculator import get_current_global_batch_size, update_num_microbatches

        args = self._live.args
        args.curr_iteration = iteration - 1
        update_num_microbatches(args.consumed_train_samples, consistency_check=False)
        samples = get_current_global_batch_size()
        losses: Mapping[str, Any] = {}
        if iteration in args.iterations_to_skip:
            args.skipped_train_samples += samples
            self._record = {}
        else:
            self._step.outcome = outcome["step"] if outcome is not None else None
            self._begin_log(iteration)
            losses = self._train_step(iteration, self._batches_from(args.consumed_train_samples))
            self._batches_at = args.consumed_train_samples + samples
            if self._live.boundary_log is not None:
                self._live.boundary_log.end()
        args.consumed_train_samples += samples
        self._live.iteration = iteration
        return losses

    @override
    def record(self) -> Mapping[str, Any]:
        return self._record

    @override
    def sent(self, iteration: int) -> str | None:
        return None if self._live.boundary_log is None else self._live.boundary_log.digest(iteration)

    def _begin_log(self, iteration: int) -> None:
        """Begin ``iteration`` in this rank's boundary log, and in the logs of other stages that this rank reads.

        This rank logs again what it sends, because a replacement has no log of the original iteration.
        """
        if self._live.boundary_log is not None:
            self._live.boundary_log.begin(iteration)
        if self._live.feeds is not None:
            self._live.feeds.begin(iteration)

    def _train_step(self, iteration: int, batches: Any) -> Mapping[str, Any]:
        live = self._live
        losses, skipped, grad_norm = live.host.step(
            self._loop, batches, chunks=self._chunks, optimizer=live.optimizer, scheduler=live.scheduler,
            iteration=iteration - 1,
        )  # fmt: skip
        self._ledger.replayed(iteration, losses, skipped, grad_norm)
        self._record = {
            "step": self._commit.again, "skipped": skipped,
            "grad_norm": grad_norm if grad_norm is None else float(grad_norm),
        }  # fmt: skip
        return dict(losses)

    def _batches_from(self, consumed: int) -> Any:
        """Return data iterators in the form that Megatron's ``train_step`` expects.

        The batches begin at sample ``consumed``. If the last replayed iteration ended there, its iterators are reused.
        """
        from megatron.core.rerun_state_machine import RerunDataIterator

        if self._batches is None or self._batches_at != consumed:
            opened = [
                None if loader is None else RerunDataIterator(loader)
                for loader in train_batches_from(self._live, consumed)
            ]
            self._batches = opened if len(self._chunks) > 1 else opened[0]
        return self._batches

    # Surroundings of a replay

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Prepare Megatron for a replay in a ``with`` block, and undo the preparation at the end of the block.

        For example, a replay uses neither overlapped reductions nor communication with stages that do not replay.
        """
        undo = self._live.undo
        try:
            for put_aside in (
                self._own_progress, self._own_schedule, self._own_metrics, self._without_reruns, self._without_overlap,
                self._training_config, self._without_other_stages,
            ):  # fmt: skip
                put_aside(undo)
            undo.set(self._commit, "mode", self._step)
            undo.push(self._mode.end)
            self._mode.begin()
            yield
        finally:
            undo.close()

    def _own_progress(self, undo: UndoStack) -> None:
        """Restore the present iteration and numbers of consumed samples after the replay.

        A replay repeats no evaluations, so it would not arrive at the number of samples that evaluations consumed.
        """
        from megatron.core.num_microbatches_calculator import update_num_microbatches
        from megatron.core.rerun_state_machine import get_rerun_state_machine

        args, reruns, before = self._live.args, get_rerun_state_machine(), progress(self._live)
        iteration = getattr(args, "curr_iteration", None)
        rerun_iteration = reruns.current_iteration

        def back() -> None:
            put_progress(self._live, before)
            args.curr_iteration = iteration
            reruns.current_iteration = rerun_iteration
            update_num_microbatches(args.consumed_train_samples, consistency_check=False)

        undo.push(back)

    def _own_schedule(self, undo: UndoStack) -> None:
        """Restore the job's present learning-rate schedule after the replay, except for the position in it.

        A replay uses the schedule of the original iterations. The present schedule differs from it if the job now
        trains for longer than first planned.
        """
        scheduler = self._live.scheduler
        planned = {name: value for name, value in scheduler.state_dict().items() if name != "num_steps"}
        undo.push(lambda: put_schedule(scheduler, planned))

    def _own_metrics(self, undo: UndoStack) -> None:
        """Keep the replay's losses of routers and of multi-token prediction out of the sums that Megatron logs."""
        from megatron.core.transformer.moe import moe_logging
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

        before = moe_logging.get_moe_metrics_tracker()
        undo.push(lambda: moe_logging.set_moe_metrics_tracker(before))
        moe_logging.set_moe_metrics_tracker(moe_logging.MoEMetricsTracker())
        undo.set(MTPLossLoggingHelper, "tracker", {})

    def _without_reruns(self, undo: UndoStack) -> None:
        """Turn off Megatron's second pass after a rejected result.

        For this pass, all ranks of the job communicate in every iteration, but only some ranks replay.
        """
        from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine

        undo.set(get_rerun_state_machine(), "mode", RerunMode.DISABLED)

    def _without_other_stages(self, undo: UndoStack) -> None:
        """Replace all communication with other stages, which do not take part in the replay.

        Tensors come from the other stages' boundary logs. Norms, overflow flags and token counts come from records.
        """
        if self._feeding is None:
            return
        from megatron.core.utils import get_attr_wrapped_model

        single = self._group_of_this_rank()
        undo.set(get_attr_wrapped_model(self._chunks[0], "pg_collection"), "mp", single)
        for config in (self._live.args, self._loop.config):
            undo.set(config, "barrier_with_L1_time", False)
        for member in members(self._live.optimizer):
            undo.set(member, "grad_stats_parallel_group", single)
        for chain in layer_wise(self._live.optimizer):  # It would count zeros over all ranks of the job.
            undo.set(chain.config, "log_num_zeros_in_grad", False)
        undo.set(self._live, "feeds", self._feeding.feeds())

    def _group_of_this_rank(self) -> Any:
        """Return a process group that has only this rank; it is destroyed when the replay ends."""
        if self._single is None:
            single = self._single = dist.new_group([dist.get_rank()], use_local_synchronization=True)

            def end_group() -> None:
                # A failure has already destroyed this group with all other groups.
                if dist.is_initialized() and single in dist.distributed_c10d._world.pg_map:
                    dist.destroy_process_group(single)

            self._live.undo.push(end_group)
        return self._single

    def _without_reductions(self, undo: UndoStack) -> None:
        """Prevent reductions over ranks in the redo of a step, because other ranks may not redo this step.

        The results of these reductions come from the step's record.
        """
        for member in members(self._live.optimizer):
            if getattr(member, "grad_scaler", None) is not None:
                undo.set(member, "grad_stats_parallel_group", self._group_of_this_rank())
            if hasattr(member, "config"):
                undo.set(member.config, "log_num_zeros_in_grad", False)

    def _without_overlap(self, undo: UndoStack) -> None:
        """Turn off overlapped reductions and gathers, which would wait for the gradients of frozen parameters."""
        hooked = [chunk for chunk in self._chunks if chunk.remove_forward_pre_hook_handles]

        def restore_hooks() -> None:
            for chunk in hooked:
                if not chunk.remove_forward_pre_hook_handles:
                    chunk.enable_forward_pre_hook()

        undo.push(restore_hooks)
        for chunk in hooked:
            chunk.disable_forward_pre_hook(param_sync=False)
        for config in {id(chunk.ddp_config): chunk.ddp_config for chunk in self._chunks}.values():
            for name in ("overlap_grad_reduce", "overlap_param_gather", "align_param_gather"):
                undo.set(config, name, False)

    def _training_config(self, undo: UndoStack) -> None:
        """Set the functions that Megatron's ``train`` sets in the model's configuration before its first step.

        The functions for overlapped communication stay unset.
        """
        config, optimizer = self._loop.config, self._live.optimizer
        # The trainer's own function also reduces experts in slots over their replicas.
        finalize = config.finalize_model_grads_func or self._live.host.finalize_model_grads

        def finalize_as_ever(model: list[Any], num_tokens: Any = None, *args: Any, **kwargs: Any) -> Any:
            # Megatron packs the gradients of all trainable parameters into one tensor and reduces it. A sum over more
            # than two ranks depends on a number's position in the tensor, so frozen parameters are packed as well.
            with self._mode.as_if_active():
                if self._feeding is None or num_tokens is None:
                    return finalize(model, num_tokens, *args, **kwargs)
                # Megatron would ask the last stage for the count, but that stage does not run.
                result = finalize(model, None, *args, **kwargs)
                assert self._step.outcome is not None
                divide_gradients(model, self._step.outcome["num_tokens"], num_tokens)
                return result

        for chunk in self._chunks:
            chunk.train()
        for name, value in {
            "grad_scale_func": config.grad_scale_func or optimizer.scale_loss,
            "finalize_model_grads_func": finalize_as_ever,
            "no_sync_func": None,
            "grad_sync_func": None,
            "param_sync_func": None,
        }.items():
            undo.set(config, name, value)
