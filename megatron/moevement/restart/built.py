"""Steps of every setup of a job: restoring the first progress, and bookkeeping after the model is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.moevement.elastic.formation import Formation
from megatron.moevement.elastic.loads import RoutedLoads
from megatron.moevement.elastic.pieces import RankPosition
from megatron.moevement.elastic.replicas import mark_replicas
from megatron.moevement.elastic.slots import slots
from megatron.moevement.restart import leftovers
from megatron.moevement.restart.groups import Groups
from megatron.moevement.runtime.job import Job
from megatron.moevement.runtime.settings import settings_of
from moevement_core.comms.exchange import all_gather_objects
from moevement_core.restart.generation import generation

Setup = Callable[[], tuple[list[Any], Any, Any]]
"""Function of Megatron that returns model, optimizer and scheduler."""


class FirstProgress:
    """Iteration and consumed samples in Megatron's arguments at the first start of this process."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def put(self) -> None:
        """Save the progress at the first call, and restore it at every later call."""
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
    """Record the positions of all ranks and the process groups in use, after the model is built. Collective."""
    from megatron.training import get_args

    job.stand = RankPosition.now()
    if get_args().moevement_elastic:  # Windows on disk identify positions by flags alone.
        assert job.stand == RankPosition.of(settings_of(get_args()), job.stand.rank)
    now = generation()
    job.formation = Formation(
        now.roster.generation if now is not None else 0, tuple(all_gather_objects(job.stand, RankPosition))
    )
    job.binding.groups = [groups] if groups is not None else []
    job.config_before = leftovers.config_of(job.live)
    if (expert_slots := slots()) is not None:
        mark_replicas(job.live.model or [], job.live.optimizer)
        job.loads = RoutedLoads(job.live.model or [], expert_slots, get_args().moevement_rebalance_interval)


def connect(job: Job) -> None:
    """Make the optimizer steps of training go through the job's session."""

    def step() -> Any:
        assert job.session is not None
        return job.session.step()

    job.binding.on_step = step
