"""Common parts of every way to set a job up: where it starts, and what is recorded when its model is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.moevement.elastic.held import Formation
from megatron.moevement.elastic.loads import RoutedLoads
from megatron.moevement.elastic.pieces import Stand
from megatron.moevement.elastic.replicas import mark_replicas
from megatron.moevement.elastic.slots import slots
from megatron.moevement.restart import leftovers
from megatron.moevement.restart.groups import Groups
from megatron.moevement.runtime.job import Job
from megatron.moevement.runtime.settings import settings_of
from moevement_core.restart.generation import generation
from moevement_core.session.exchange import all_gather_objects

Setup = Callable[[], tuple[list[Any], Any, Any]]
"""Megatron's own way to model, optimizer and scheduler."""


class FirstProgress:
    """Progress in Megatron's arguments before the first start of this process."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def put(self) -> None:
        """A start is the first one again, however far the job had come before."""
        from megatron.core.num_microbatches_calculator import update_num_microbatches
        from megatron.training import get_args

        args = get_args()
        if not self._values:
            names = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples", "iteration")
            self._values = {name: getattr(args, name) for name in names if hasattr(args, name)}
            return
        for name, value in self._values.items():
            setattr(args, name, value)
        update_num_microbatches(args.consumed_train_samples, consistency_check=False)


def has_built(job: Job, groups: Groups | None) -> None:
    """Note where this rank stands and what its live objects refer to; every rank calls it when its model is built."""
    from megatron.training import get_args

    job.stand = Stand.now()
    if get_args().moevement_elastic:  # windows on disk say where ranks stood by their flags alone
        assert job.stand == Stand.of(settings_of(get_args()), job.stand.rank)
    now = generation()
    job.formation = Formation(
        now.roster.generation if now is not None else 0, tuple(all_gather_objects(job.stand, Stand))
    )
    job.binding.groups = [groups] if groups is not None else []
    job.config_before = leftovers.config_of(job.live)
    if (its := slots()) is not None:
        mark_replicas(job.live.model or [], job.live.optimizer)
        job.loads = RoutedLoads(job.live.model or [], its, get_args().moevement_rebalance_interval)


def connect(job: Job) -> None:
    """The session's part of an optimizer step."""

    def step() -> Any:
        assert job.session is not None
        return job.session.step()

    job.binding.on_step = step
