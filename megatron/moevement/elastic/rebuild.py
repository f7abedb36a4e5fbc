"""Construction of Megatron's model for the present ranks of an elastic job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import override

from megatron.moevement.arguments import RunConfig
from megatron.moevement.elastic.setup import place_experts, record_placement
from megatron.moevement.restart.built import FirstProgress, Setup, connect, has_built
from megatron.moevement.restart.groups import Groups
from megatron.moevement.runtime import recorder
from megatron.moevement.runtime.job import Process
from moevement_core.saving.identity import JobNames
from moevement_core.session.resize import Offer, Rebuilder
from moevement_core.session.run_directory import lock_run_directory
from moevement_core.trainer.interface import BindingInterface
from moevement_core.util.lock import FolderLock


class MegatronRebuilder(Rebuilder):
    """Construction of model, optimizer and scheduler by Megatron, before it opens data.

    Args:
        process: this process.
        run: configuration of the run.
        setup: Megatron's function that builds model, optimizer and scheduler.
        groups: process groups of this generation.
        first: iteration and consumed samples in Megatron's arguments when this process first started.
    """

    def __init__(
        self, process: Process, run: RunConfig, setup: Setup, groups: Groups | None, first: FirstProgress
    ) -> None:
        self._process, self._run, self._setup, self._groups, self._first = process, run, setup, groups, first
        self._lock: FolderLock | None = None

    @override
    def drop(self) -> None:
        self._process.start_over()

    @override
    def build(self, names: JobNames, offers: Sequence[Offer]) -> BindingInterface:
        self._first.put(self._process.args)
        args, job, run_dir = self._process.args, self._process.job, self._run.run_dir
        live, binding = job.live, job.binding
        with live.undo.nested() as inner:
            live.host.share_keys(inner, binding.parameter_keys, ())
            job.names, binding.job_name = names, names.name
            self._lock = lock_run_directory(run_dir, names.name) if run_dir is not None else None
            for name in ("load", "pretrained_checkpoint"):
                inner.set(args, name, None)
            loads = place_experts(offers)
            live.model, live.optimizer, live.scheduler = self._setup()
        has_built(job, self._groups)
        connect(job)
        if job.loads is not None:
            job.loads.put(loads)
        return binding

    @override
    def has_state(self) -> None:
        self._process.job.has_begun = True
        self._process.resizing.forget()

    @override
    def begin_record(self, binding: BindingInterface) -> None:
        live = self._process.job.live
        recorder.begin(live, live.args, self._run.run_dir, self._lock)
        record_placement(live.record, live.iteration)
