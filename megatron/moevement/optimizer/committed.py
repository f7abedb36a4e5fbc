"""Commit point of Megatron's chained optimizer, whose step this module replaces.

Megatron chains an optimizer for dense weights and one for experts. The step of this chain mixes reductions, updates and
gathers. The replacement orders them:

1. All reductions come first, and a restart may interrupt them. The rank copies their results to the host at once: if it
   read a result from the device later, it might wait for a reduction, and so for other ranks.
2. Ranks vote. One of them then asks the coordinator whether a failure has interrupted the generation, because the
   result of an aborted reduction may be garbage.
3. The update section follows. No restart interrupts it, and it waits for no other rank. In it, the rank clips
   gradients, executes the step of every chained optimizer, copies compute weights, and sets its mark (the newest
   committed iteration).
4. Ranks gather parameters. A restart may interrupt the gather, and ranks can repeat it.

See :mod:`moevement_core.trainer.commit`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, override

import torch

from megatron.moevement.fp8.delayed import remaking
from megatron.moevement.optimizer import weights
from megatron.moevement.optimizer.modes import Follow, RedoUpdates, Train
from megatron.moevement.optimizer.outcome import Reduced, outcome_of, step_counts
from megatron.moevement.optimizer.scales import Scales
from megatron.moevement.patches import replace_on
from megatron.moevement.state_digest import layer_wise, loss_scaler, members
from moevement_core.errors import ConfigError
from moevement_core.restart import injection
from moevement_core.restart.faults import Phase
from moevement_core.restart.generation import atomic, refuse_if_interrupted
from moevement_core.trainer.commit import Commit, Mark, Vote

REDUCTIONS = ("prepare_grads", "get_grad_norm", "_compute_grad_norms_by_group")
ZEROS = "count_zeros"
UPDATE = "step_with_ready_grads"
COPIES = ("_copy_main_params_to_model_params", "_copy_main_params_to_param_buffer")
SYNC = "start_param_sync_for_bucket_group_subset"
MATRICES = "allgather_params"
TOGETHER = "_should_defer_mxfp8_param_sync"
UNSCALE = "_unscale_main_grads_and_check_for_nan"


def check_supported(optimizer: Any) -> None:
    """Refuse an optimizer whose step a recovery cannot repeat for single operators.

    Raises:
        ConfigError: the optimizer is not Megatron's chain of optimizers around Adam.
    """
    if not all(hasattr(optimizer, name) for name in (*REDUCTIONS[:2], "chained_optimizers")):
        raise ConfigError(
            f"--moevement-sparse-ckpt with an optimizer of type {type(optimizer).__name__}: a replay needs Megatron's "
            "ChainedOptimizer; use --optimizer adam"
        )


class CommittedOptimizer(Commit):
    """Commit point of one optimizer. Its construction replaces the optimizer's step and reductions.

    Args:
        optimizer: Megatron's ``ChainedOptimizer``.
        boundary: function that returns a copy of the boundary state after the current iteration. Loss scalers, step
            counts and the learning-rate schedule in it have their values from before the step.
        advance: function that returns the state of the learning-rate schedule after the step, from the result of
            ``boundary``.
        vote: function that returns once every rank of the job has called it; it raises an error if a rank was
            interrupted.
        step: function that Megatron's trainer calls instead of ``optimizer.step()`` in training. The function has to
            call :meth:`step` of this object, with the iteration.
        scales: scales of FP8 on this rank; None if no weights are in FP8.
        num_tokens: function that waits for the device and returns the number of tokens by which gradients were divided;
            None without per-token loss.
        validates: True to refuse an update if the norm of the gradients is not finite.
    """

    def __init__(
        self,
        optimizer: Any,
        boundary: Callable[[], Mapping[str, Any]],
        advance: Callable[[Any], Any],
        vote: Vote,
        step: Callable[[], Any],
        scales: Scales | None = None,
        num_tokens: Callable[[], int | None] = lambda: None,
        *,
        validates: bool = False,
    ) -> None:
        super().__init__()
        self._validates = validates
        self._num_tokens = num_tokens
        self._scales = scales
        self._optimizer, self._boundary, self._advance, self._vote = optimizer, boundary, advance, vote
        self._step = type(optimizer).step.__get__(optimizer)
        self.mode = Train(optimizer)
        """Mode that supplies the results of reductions (``modes.py``); a replay sets another mode for its duration."""
        self.again: Mapping[str, Any] = {}
        """Outcome of the last step that a replay executed."""
        self._prepared: Mapping[str, Any] = {}
        self._reduced = Reduced()
        self._section: ExitStack | None = None
        self._is_deferring = self._has_stepped = False
        clips = any(
            member.config.clip_grad > 0.0
            for member in members(optimizer)
            if hasattr(member, "config") and not getattr(member, "is_stub_optimizer", False)
        )
        for member in members(optimizer):
            if hasattr(member, "config"):  # A barrier of the timers would wait for other ranks inside the update.
                member.config.barrier_with_L1_time = False
                # All chunks are gathered after the update section.
                member.config.overlap_param_gather_with_optimizer_step = False
        for chunk in (chunk for member in self._gathering() for chunk in member.model_chunks):
            chunk.overlap_param_gather_with_optimizer_step = False
        self._replace(step, last=REDUCTIONS[2] if clips else REDUCTIONS[1])

    def _replace(self, step: Callable[[], Any], last: str) -> None:
        """Wrap the optimizer's step and reductions; ``last`` names the reduction after which the update begins."""

        def in_mode(original: Callable[[], Any]) -> Any:
            if type(self.mode) is Train:
                return step()
            result = original()
            self.again = outcome_of(result, self._reduced)
            return result

        replace_on(self._optimizer, "step", in_mode)
        for name in REDUCTIONS:
            replace_on(self._optimizer, name, functools.partial(self._reduce, name, name == last))
        replace_on(self._optimizer, ZEROS, self._in_mode_zeros)
        replace_on(self._optimizer, UPDATE, self._in_mode_update)
        self._replace_copies()
        for number, member in enumerate(members(self._optimizer)):
            if hasattr(type(member), UNSCALE):  # an optimizer of FP32 weights has no scale
                replace_on(member, UNSCALE, functools.partial(self._verdict, number))

    def _reduce(self, name: str, is_last: bool, original: Callable[[], Any]) -> Any:
        """Ask :attr:`mode` for the result of a reduction.

        After the last reduction of a step, the method also begins the update section, which no restart interrupts.
        """
        result = getattr(self.mode, name)(original)
        self._reduced.take(name, result, self._optimizer)
        if name == REDUCTIONS[0]:
            self._reduced.num_tokens = self.mode.num_tokens(self._num_tokens)
        if is_last and self._section is not None and self._optimizer.config.log_num_zeros_in_grad:
            self._reduced.zeros = self._optimizer.count_zeros()
        has_overflow = name == REDUCTIONS[0] and bool(result)  # The step then ends here, without an update.
        if (is_last or has_overflow) and self._section is not None:
            self._begin_update(self._section)
        return result

    def _begin_update(self, section: ExitStack) -> None:
        """Vote if the job trains, and enter the update section, which no restart interrupts."""
        injection.at(Phase.COMMIT)
        if type(self.mode) is Train:
            if self._validates:
                self._reduced.check_finite()
            self._vote()
        section.enter_context(atomic())
        self.torn = True
        injection.at(Phase.STEP)

    def _in_mode_zeros(self, original: Callable[[], int]) -> int:
        """Return a count of zeros; inside the update section, a count from before the section.

        The update section runs from the last reduction to the end of the update, and no rank may wait for another in
        it. Counting needs a reduction, but Megatron counts in the section, after it clips gradients. So this class
        counts before the section. The result differs from Megatron's count only if clipping rounds a gradient to zero.
        """
        if self._reduced.zeros is None:
            return self.mode.count_zeros(original)
        return self._reduced.zeros

    def _in_mode_update(self, original: Callable[[], bool]) -> bool:
        if self._section is not None:  # In a trained or followed step, gradients are already clipped.
            self.updating()
        return self.mode.update(original)

    def _verdict(self, number: int, original: Callable[[], bool]) -> bool:
        return self.mode.verdict(original, number)

    def _replace_copies(self) -> None:
        """Move the computation of FP8 weights, and Muon's gather, out of the update section.

        In the update section no rank may wait for another. The computation of FP8 weights waits, because it reduces the
        weights' scales over all replicas. It becomes a part of the gather of parameters. That gather includes the
        matrices of Muon, which Megatron's layer-wise optimizer would gather in its step.
        """
        for member in self._gathering():
            if weights.is_quantised(member):
                for name in COPIES:
                    replace_on(member, name, functools.partial(self._unless_deferred, member))
        for chain in layer_wise(self._optimizer):
            for name in (SYNC, MATRICES):
                replace_on(chain, name, lambda original: None if self._is_deferring else original())
        if hasattr(self._optimizer, TOGETHER):
            replace_on(self._optimizer, TOGETHER, lambda original: not self._is_deferring and original())

    def _unless_deferred(self, member: Any, original: Callable[[], None]) -> None:
        if not self._is_deferring:
            original()
            weights.round_masters(member)

    # A step in training

    @override
    def step(self, iteration: int) -> Any:
        # Random states and router buffers are final now; the step changes the rest in a known way.
        self._prepared = self._boundary()
        try:
            with ExitStack() as self._section, self._gathers_deferred():
                result = self._step()
                self._set_mark(iteration, result)
        finally:
            self._section = None
        self.updated(iteration)
        injection.at(Phase.GATHER, iteration)
        if result[0]:
            self.gather()
        return result

    def _set_mark(self, iteration: int, result: Any) -> None:
        outcome = outcome_of(result, self._reduced)
        moved = {"loss_scalers": self._scalers(), "group_steps": step_counts(self._optimizer)}
        if result[0]:
            moved["scheduler"] = self._advance(self._prepared)
        self.mark, self._has_stepped = Mark(iteration, {**self._prepared, **moved}, outcome), True
        self.torn = False

    def _scalers(self) -> list[Any]:
        return [_copied(loss_scaler(member)) for member in members(self._optimizer)]

    def _gathering(self) -> list[Any]:
        return [member for member in members(self._optimizer) if hasattr(member, SYNC)]

    @contextmanager
    def _gathers_deferred(self) -> Iterator[None]:
        self._defer_gathers(True)
        try:
            yield
        finally:
            self._defer_gathers(False)

    def _defer_gathers(self, is_deferred: bool) -> None:
        self._is_deferring = is_deferred
        for member in self._gathering():
            member._defer_param_sync = is_deferred

    @override
    def gather(self, *, now: bool = False) -> None:
        quantised = [member for member in self._gathering() if weights.is_quantised(member)]
        if any(map(weights.gathers_by_gradients, self._gathering())):
            self.overwriting()
        with self.making():
            for member in quantised:
                self._make_weights(member)
            weights.gather((chunk for member in self._gathering() for chunk in member.model_chunks), force=now)
            weights.gather_matrices(self._optimizer)

    def making(self) -> AbstractContextManager[None]:
        """Return the context in which the caller computes FP8 weights from the current master weights.

        If the newest committed iteration skipped its update, the context keeps the scales of the existing weights, so
        that the weights do not change.
        """
        outcome = self.mark.outcome if self.mark is not None else {}
        is_as_it_was = outcome["overflow"] if outcome else not self._has_stepped
        return remaking() if is_as_it_was else nullcontext()

    def _make_weights(self, member: Any) -> None:
        """Compute FP8 weights from master weights, with the scales of the newest committed iteration.

        These scales are in the rank's :class:`~moevement_core.trainer.commit.Mark`, because an interrupted iteration
        may have changed the live scales. The computation updates the amax histories, and the function copies the
        updated histories into the mark.
        """
        if self.mark is None or self._scales is None:
            weights.copy_masters(member)
            return
        self._scales.put(self.mark.boundary)
        weights.copy_masters(member)
        refuse_if_interrupted()  # An aborted reduction of amaxes may have returned garbage.
        self.mark = replace(self.mark, boundary={**self.mark.boundary, **self._scales.copies()})

    # After a failure

    @override
    def interrupted(self) -> None:
        """Reset what an interrupted step may leave: an open update section, another mode, and deferred gathers.

        Without the reset, steps of a replay would stay forever in the old update section, in which no restart may
        interrupt the rank. With gathers still deferred, a replay would train on weights that were not gathered.
        """
        self._section = None
        self.mode = Train(self._optimizer)
        self._defer_gathers(False)

    @override
    def follow(self, iteration: int, outcome: Mapping[str, Any], common: Mapping[str, Any]) -> None:
        """Execute and commit the update of ``iteration``, which another rank has executed; gather no parameters.

        ``outcome`` has the results of the step's reductions on that rank, and ``common`` its loss scalers.
        """
        for member, state in zip(members(self._optimizer), common["loss_scalers"], strict=True):
            if state:
                member.grad_scaler.load_state_dict(_copied(state))
        with self.in_mode(Follow(self._optimizer, outcome)):
            try:
                with ExitStack() as self._section, self._gathers_deferred():
                    self._set_mark(iteration, self._step())
            finally:
                self._section = None

    def redo(self, mode: RedoUpdates) -> None:
        """Repeat an update from logged gradients, without a gather of parameters.

        Before the call, the caller makes each optimizer with a loss scaler reduce its overflow flag over this rank
        alone. The call then waits for no other rank.
        """
        with self.in_mode(mode), self._gathers_deferred():
            self._step()

    @contextmanager
    def in_mode(self, mode: Train) -> Iterator[None]:
        """Make ``mode`` supply the results of reductions in a ``with`` block."""
        before, self.mode = self.mode, mode
        try:
            yield
        finally:
            self.mode = before


def _copied(state: Any) -> Any:
    if not state:
        return state
    return {name: value.clone() if torch.is_tensor(value) else value for name, value in state.items()}
