"""The commit point: in which order a step reduces, updates and gathers, so that a failure leaves it whole or undone.

Megatron's chained step mixes the three. Here every reduction comes first and may be interrupted, and what came of it is
brought to the host: a wait for a device on which a reduction is still under way is one for other ranks. Then, in a
section that no restart interrupts and that waits for nobody, gradients are clipped, every member steps, compute weights
are copied, and the mark is set; then parameters are gathered, which may be interrupted and done again.

So if any rank has made a step, every rank had brought its part to the last reduction of it: the others can follow with
what came of that reduction (:meth:`CommitPoint.follow`), without a gradient of anybody else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megatron.moevement.optimizer.frozen_step import Reduced, outcome_of, step_counts
from megatron.moevement.optimizer.norms import as_clipped_by
from megatron.moevement.restart import injection
from megatron.moevement.state_digest import loss_scaler, members
from moevement_core.injection import Phase


@dataclass(frozen=True, slots=True)
class Mark:
    """The newest iteration that this rank has committed."""

    iteration: int
    boundary: Mapping[str, Any]
    """What stands between it and the next: random states, router buffers, loss scalers, schedule, samples; copies."""
    outcome: Mapping[str, Any]
    """What came of its step; empty if there was none."""
    resumed: Mapping[str, Any] | None = None
    """The boundary where the next iteration began, if it did: after everything that was due between the two."""


class CommitPoint:
    """Surrounds the step of one optimizer.

    Args:
        optimizer: Megatron's ``ChainedOptimizer``.
        boundary: gives the boundary state after the iteration that is under way, as copies; what the step itself moves
            (loss scalers, step counts, the schedule) as it was before.
        advance: gives the schedule's state from it, where the update was made.
        atomic: a section that no restart interrupts.
        vote: returns when every rank of the job has come here, if no reduction of the step has made sure of that.
    """

    def __init__(
        self,
        optimizer: Any,
        boundary: Callable[[], Mapping[str, Any]],
        advance: Callable[[Any], Any],
        atomic: Callable[[], AbstractContextManager[Any]],
        vote: Callable[[], None],
    ) -> None:
        self.mark: Mark | None = None
        self.torn = False
        """An update was begun and not ended: what this rank holds is no state of any iteration."""
        self._optimizer, self._boundary, self._advance = optimizer, boundary, advance
        self._atomic, self._vote = atomic, vote
        self._step = type(optimizer).step.__get__(optimizer)
        self._prepared: Mapping[str, Any] = {}
        self._reduced = Reduced()
        self._section: ExitStack | None = None
        self._told: Mapping[str, Any] | None = None
        self._clips = any(member.config.clip_grad > 0.0 for member in members(optimizer) if hasattr(member, "config"))
        for member in members(optimizer):
            if hasattr(member, "config"):  # a barrier of the timers would wait for others inside the update
                member.config.barrier_with_L1_time = False
        last = "_compute_grad_norms_by_group" if self._clips else "get_grad_norm"
        for name in ("prepare_grads", "get_grad_norm", "_compute_grad_norms_by_group"):
            vars(optimizer)[name] = self._around(getattr(optimizer, name), name, is_last=name == last)

    # A step

    def step(self, iteration: int) -> Any:
        """Megatron's step of ``iteration``, in order; what it returned."""
        # Random states and router buffers are final now; of the rest it is known what the step makes of them.
        self._prepared = self._boundary()
        return self._in_order(iteration)

    def _in_order(self, iteration: int) -> Any:
        try:
            with ExitStack() as self._section, self._gathers_deferred():
                result = self._step()
                self._set_mark(iteration, result)
        finally:
            self._section = None
        injection.at(Phase.GATHER, iteration)
        if result[0]:
            self.gather()
        return result

    def _around(self, original: Callable[[], Any], name: str, *, is_last: bool) -> Callable[[], Any]:
        """A reduction of the step: the first time as ever, later what is told; after the last one the update begins."""

        def reduction() -> Any:
            result = original() if self._told is None else self._as_told(name)
            self._reduced.take(name, result, self._optimizer)
            if is_last and self._section is not None:
                injection.at(Phase.COMMIT)
                if self._told is None:
                    self._vote()
                self._section.enter_context(self._atomic())
                self.torn = True
                injection.at(Phase.STEP)
            return result

        return reduction

    def _set_mark(self, iteration: int, result: Any) -> None:
        outcome = outcome_of(result, self._reduced)
        moved = {"loss_scalers": self._scalers(), "group_steps": step_counts(self._optimizer)}
        if result[0]:
            moved["scheduler"] = self._advance(self._prepared)
        self.mark = Mark(iteration, {**self._prepared, **moved}, outcome)
        self.torn = False

    def _scalers(self) -> list[Any]:
        return [_copied(loss_scaler(member)) for member in members(self._optimizer)]

    def _gathering(self) -> list[Any]:
        return [one for one in members(self._optimizer) if hasattr(one, "start_param_sync_for_bucket_group_subset")]

    @contextmanager
    def _gathers_deferred(self) -> Iterator[None]:
        self._defer_gathers(True)
        try:
            yield
        finally:
            self._defer_gathers(False)

    def _defer_gathers(self, is_deferred: bool) -> None:
        for member in self._gathering():
            member._defer_param_sync = is_deferred

    def gather(self, *, now: bool = False) -> None:
        """Bring every rank's part of the new weights to its data-parallel peers; may be done again.

        Args:
            now: also where the next forward pass would gather them.
        """
        for member in self._gathering():
            if not member.ddp_config.overlap_param_gather:
                member.start_param_sync_for_bucket_group_subset()
            elif now:
                for chunk in member.model_chunks:
                    chunk.start_param_sync(force_sync=True)

    # After a failure

    def interrupted(self) -> None:
        """An exception from outside came at any moment: a step that was under way is none any more.

        With its section left open the steps of a replay would wait for every rank and never let a restart in; with
        gathers still deferred they would train on weights that nobody gathers.
        """
        self._section = self._told = None
        self._defer_gathers(False)

    def follow(self, iteration: int, outcome: Mapping[str, Any], scalers: list[Any]) -> None:
        """Make the step of ``iteration`` that others have made; this rank had brought its part to every reduction.

        Parameters are not gathered yet.

        Args:
            iteration: the one after this rank's mark.
            outcome: what came of it on a rank of the same model replica.
            scalers: its loss scalers afterwards.
        """
        for member, state in zip(members(self._optimizer), scalers, strict=True):
            if state:
                member.grad_scaler.load_state_dict(_copied(state))
        self._told = outcome
        try:
            with ExitStack() as self._section, self._gathers_deferred():
                self._set_mark(iteration, self._step())
        finally:
            self._section = self._told = None

    def _as_told(self, name: str) -> Any:
        assert self._told is not None
        match name:
            case "prepare_grads":
                for member, found in zip(members(self._optimizer), self._told["found_inf"], strict=True):
                    if found is not None:
                        member.found_inf.fill_(float(found))
                return self._told["overflow"]
            case "get_grad_norm":
                return as_clipped_by(self._told["clip_norm"])
            case _:
                norms = self._told["clip_norms_by_group"]
                self._optimizer.grad_norms_by_group = {name: as_clipped_by(norm) for name, norm in norms.items()}
                return self._optimizer.grad_norms_by_group


def norm_spans_job(optimizer: Any, world: int) -> bool:
    """Whether every rank of the job contributes to every norm of a step, so that who has one knows that all have come.

    Not without the distributed optimizer, where a norm is that of a model replica; nor with several instances of it,
    where it is that of an instance.
    """
    groups = [member.get_grad_stats_parallel_group() for member in members(optimizer)]
    return bool(groups) and all(group is None or dist.get_world_size(group) == world for group in groups)


def _copied(state: Any) -> Any:
    import torch

    if not state:
        return state
    return {name: value.clone() if torch.is_tensor(value) else value for name, value in state.items()}
