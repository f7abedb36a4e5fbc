"""Adapter that enters Megatron's ``pretrain()`` again after every failure."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, override

from megatron.moevement.elastic.grid import blocks_of, grid_of
from megatron.moevement.platform import is_cpu
from megatron.moevement.restart import leftovers, megatron_state, saves
from megatron.moevement.runtime.host import MegatronLM
from megatron.moevement.runtime.job import Process
from moevement_core.device import visible_devices
from moevement_core.rendezvous.resizing import Grid
from moevement_core.restart.faults import Fault
from moevement_core.restart.in_process import is_restarted_in_process, run_through_failures
from moevement_core.restart.training import GuardSettings, Training


def restart_in_process(
    process: Process, original: Callable[..., Any], *args: Any, store: Any = None, **kwargs: Any
) -> Any:
    """Enter ``pretrain`` again after failures, in jobs that restart in place.

    In all other jobs, the function only calls ``pretrain``.
    """
    from megatron.training import get_args

    process.take_trainer(get_args(), MegatronLM())
    if not is_restarted_in_process():
        return original(*args, store=store, **kwargs)
    return run_through_failures(_MegatronLMTraining(process, original, args, kwargs))


class RestartedTraining(Training):
    """Training on Megatron's core by any trainer that builds and keeps its objects in a :class:`Process`."""

    def __init__(
        self, process: Process, pretrain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._process, self._pretrain, self._args, self._kwargs = process, pretrain, args, kwargs

    @property
    @override
    def watching(self) -> GuardSettings:
        args = self._process.args
        return GuardSettings(
            args.inprocess_soft_timeout,
            args.inprocess_monitor_thread_interval,
            [Fault.parse(text) for text in args.moevement_inject],
            () if is_cpu() else visible_devices(),
        )

    @override
    def enter(self, store: Any) -> Any:
        return self._pretrain(*self._args, store=store, **self._kwargs)

    @property
    @override
    def grid(self) -> Grid | None:
        return grid_of(self._process.args)

    @property
    @override
    def blocks(self) -> tuple[int, ...]:
        return blocks_of(self._process.args)

    @override
    def interrupted(self) -> None:
        job = self._process.job
        if job.session is not None:
            job.session.disconnect()
        megatron_state.forget_core()
        self.forget_generation(was_saving=job.live.is_saving)
        job.live.is_saving = False
        job.live.datasets_asked = 0
        job.binding.forget_loop()
        job.live.undo.close()
        leftovers.clear_thread()
        if job.session is not None:
            job.session.interrupted()
        leftovers.clear(job.live, job.config_before)
        if not job.has_begun:  # This rank has no state to keep.
            self._process.start_over()

    @abstractmethod
    def forget_generation(self, *, was_saving: bool) -> None:
        """Remove the trainer's own objects of an interrupted generation.

        Args:
            was_saving: True if the interruption hit a dense save.
        """

    @override
    def ended(self) -> None:
        megatron_state.end_data_workers()

    @property
    @override
    def has_begun(self) -> bool:
        return self._process.job.has_begun

    @property
    @override
    def iteration(self) -> int:
        return self._process.job.live.iteration

    @property
    @override
    def resumed_in(self) -> int:
        return self._process.job.resumed_in


class _MegatronLMTraining(RestartedTraining):
    def __init__(
        self, process: Process, pretrain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        super().__init__(process, pretrain, args, kwargs)
        self._program_start = megatron_state.program_start()

    @override
    def take_rank(self, rank: int, world: int, device: int | None) -> None:
        megatron_state.take_rank(self._process.args, rank, world, device)

    @override
    def forget_generation(self, *, was_saving: bool) -> None:
        megatron_state.forget_timers(self._process.args)
        megatron_state.set_program_start(self._program_start)
        saves.forget_saves(self._process.args, was_interrupted=was_saving)
