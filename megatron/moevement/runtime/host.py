"""Interface to the trainer that runs the training loop, with Megatron-LM's own trainer as one implementation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, override

from megatron.moevement.restart.solo_build import sharing_parameter_keys
from moevement_core.util.undo import UndoStack


class TrainLoop(NamedTuple):
    """Arguments of the trainer's loop with which a replay calls the trainer's step."""

    forward_step_func: Any
    config: Any
    p2p_communicator: Any
    pg_collection: Any


class Stepped(NamedTuple):
    """Result of a training step: losses by name, True if the update was skipped, and the norm of the gradients."""

    losses: Mapping[str, Any]
    is_skipped: bool
    grad_norm: Any


class HostTrainer(ABC):
    """Trainer that owns the training loop; a recovery calls these methods inside that loop."""

    @abstractmethod
    def share_keys(self, undo: UndoStack, record: list[Any], kept: Sequence[Any]) -> None:
        """Record the keys of parameters that all ranks gather when the trainer builds its optimizer.

        Args:
            undo: stack that ends the recording.
            record: list to which the result of each gather is appended.
            kept: recorded results that are used in place of a gather; empty on a rank that gathers.
        """

    @abstractmethod
    def config(self, args: Namespace) -> dict[str, Any]:
        """Return all settings of the job, for the run directory."""

    @property
    @abstractmethod
    def finalize_model_grads(self) -> Callable[..., Any]:
        """Function that reduces gradients if the model's configuration names none."""

    @abstractmethod
    def timers(self) -> Any:
        """Return the timers of the present generation."""

    @abstractmethod
    def loaders(self, args: Namespace, train_sets: Sequence[Any], consumed: int) -> list[Any]:
        """Return a loader for each data set of the virtual stages, which begins at sample ``consumed``.

        A loader is None if this rank reads no data.
        """

    @abstractmethod
    def step(
        self, loop: TrainLoop, batches: Any, chunks: list[Any], optimizer: Any, scheduler: Any, iteration: int
    ) -> Stepped:
        """Execute the trainer's step without this project's replacements. Collective over the ranks that replay.

        Args:
            loop: arguments of the training loop.
            batches: iterators over micro-batches, one for each virtual stage, or one if there is one stage.
            chunks: virtual stages of this rank in their data-parallel wrappers.
            optimizer: optimizer of this rank.
            scheduler: learning-rate schedule.
            iteration: number of iterations before this step.
        """


class MegatronLM(HostTrainer):
    """Trainer of Megatron-LM, the package ``megatron.training``."""

    @override
    def share_keys(self, undo: UndoStack, record: list[Any], kept: Sequence[Any]) -> None:
        sharing_parameter_keys(undo, record, kept)

    @override
    def config(self, args: Namespace) -> dict[str, Any]:
        return vars(args)

    @property
    @override
    def finalize_model_grads(self) -> Callable[..., Any]:
        from megatron.training import training

        function: Callable[..., Any] = training.finalize_model_grads
        return function

    @override
    def timers(self) -> Any:
        from megatron.training import get_timers

        return get_timers()

    @override
    def loaders(self, args: Namespace, train_sets: Sequence[Any], consumed: int) -> list[Any]:
        from megatron.training import training

        return [training.build_pretraining_data_loader(train_set, consumed) for train_set in train_sets]

    @override
    def step(
        self, loop: TrainLoop, batches: Any, chunks: list[Any], optimizer: Any, scheduler: Any, iteration: int
    ) -> Stepped:
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.training import training

        schedule = get_forward_backward_func(schedule_pg_collection=loop.pg_collection)
        losses, skipped, *_, grad_norm, _, _ = own(training.train_step)(
            loop.forward_step_func, batches, chunks, optimizer, scheduler, loop.config, schedule,
            iteration=iteration, pg_collection=loop.pg_collection, p2p_communicator=loop.p2p_communicator,
        )  # fmt: skip
        return Stepped(losses, bool(skipped), grad_norm)


def own(function: Any) -> Any:
    """Return the trainer's original if ``function`` is a replacement by this project; otherwise ``function`` itself."""
    return getattr(function, "_moevement_original", function)
