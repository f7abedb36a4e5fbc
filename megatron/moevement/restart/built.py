"""Steps before and after Megatron builds a model, at a job's start and after a failure."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from megatron.moevement.elastic.loads import RoutedLoads
from megatron.moevement.elastic.recut import layout_from_flags, layout_now
from megatron.moevement.elastic.replicas import mark_replicas
from megatron.moevement.elastic.slots import slots
from megatron.moevement.restart import leftovers
from megatron.moevement.restart.groups import Groups
from megatron.moevement.runtime.job import Job
from megatron.moevement.runtime.settings import settings_of

Setup = Callable[[], tuple[list[Any], Any, Any]]
"""Function of Megatron that returns model, optimizer and scheduler."""


class FirstProgress:
    """Iteration and consumed samples that Megatron's arguments had when this process first began ``pretrain``.

    Megatron expects these values whenever it builds a model, but training changes them.
    """

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def put(self, args: Namespace) -> None:
        """Save iteration and consumed samples at the first call, and restore them at every later call."""
        from megatron.core.num_microbatches_calculator import update_num_microbatches

        if not self._values:
            names = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples", "iteration")
            self._values = {name: getattr(args, name) for name in names if hasattr(args, name)}
            return
        for name, value in self._values.items():
            setattr(args, name, value)
        update_num_microbatches(args.consumed_train_samples, consistency_check=False)


def has_built(job: Job, groups: Groups | None) -> None:
    """Store in ``job`` what follows from a newly built model: process groups, and the experts in slots."""
    args = job.live.args
    if args.moevement_elastic:  # Windows on disk identify positions by flags alone.
        now = layout_now()
        assert now == layout_from_flags(settings_of(args), now.rank)
    job.binding.groups = [groups] if groups is not None else []
    job.config_before = leftovers.config_of(job.live)
    if (expert_slots := slots()) is not None:
        mark_replicas(job.live.model or [], job.live.optimizer)
        job.loads = RoutedLoads(job.live.model or [], expert_slots, args.moevement_rebalance_interval)
        job.binding.expert_loads = job.loads.now


def connect(job: Job) -> None:
    """Make Megatron's trainer execute its optimizer steps by the job's session."""

    def step() -> Any:
        assert job.session is not None
        return job.session.step()

    job.binding.on_step = step
