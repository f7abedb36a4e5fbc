"""Rebuilding of an elastic job on its present ranks: after a failure, when it grows, and when experts move."""

from __future__ import annotations

import gc
import time
from dataclasses import replace

import torch
import torch.distributed as dist

from megatron.moevement.arguments import RunConfig
from megatron.moevement.elastic.boundary import fitted
from megatron.moevement.elastic.bring import bring_live_state, report_resized
from megatron.moevement.elastic.meeting import Meeting, live_boundary, meet
from megatron.moevement.elastic.rebuild import Rebuilt, prepare_from_snapshots
from megatron.moevement.elastic.resized import Resized
from megatron.moevement.elastic.setup import place_experts, record_placement
from megatron.moevement.elastic.survivor_state import SurvivorState
from megatron.moevement.optimizer.norms import as_logged
from megatron.moevement.restart.built import FirstProgress, Setup, connect, has_built
from megatron.moevement.restart.groups import Groups
from megatron.moevement.restart.solo_build import sharing_parameter_keys
from megatron.moevement.runtime import recorder
from megatron.moevement.runtime.job import Job, Process
from moevement_core import log
from moevement_core.comms.exchange import all_gather_objects
from moevement_core.elastic.exchange import StateMissing
from moevement_core.engine.config import Verify
from moevement_core.rebuild.prepare import Prepared
from moevement_core.saving.identity import agree_on_names
from moevement_core.session.build import build_session
from moevement_core.session.run_directory import lock_run_directory


def reassemble(process: Process, run: RunConfig, setup: Setup, groups: Groups | None, first: FirstProgress) -> bool:
    """Rebuild the job on the present ranks, from the state in the memory of survivors. Collective.

    Every rank calls it as soon as process groups are usable, before Megatron opens data. If memory holds the state only
    in snapshots, this function prepares a recovery, which runs later inside the training loop.

    Args:
        process: this process.
        run: configuration of the run.
        setup: Megatron's function that builds model, optimizer and scheduler.
        groups: process groups of this generation.
        first: iteration and consumed samples in Megatron's arguments when this process first started.

    Returns:
        True if the job is rebuilt. False on every rank if memory does not hold the whole state; the caller then starts
        the job anew from disk or from the seed.
    """
    from megatron.training import get_args

    usable_at = time.time()
    meeting = meet(process)
    job = process.start_over()
    gc.collect()  # Collect the old model before the next one is built: memory may not suffice for two.
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if meeting is None:
        return False
    first.put()
    args, live, binding = get_args(), job.live, job.binding
    assert run.session is not None
    with live.undo.nested() as inner:
        sharing_parameter_keys(inner, binding.parameter_keys, ())
        names = job.names = agree_on_names()
        binding.job_name, process.lineage = names.name, meeting.lineage
        lock = lock_run_directory(run.run_dir, names.name) if run.run_dir is not None else None
        for name in ("load", "pretrained_checkpoint"):
            inner.set(args, name, None)
        loads = place_experts(meeting)
        live.model, live.optimizer, live.scheduler = setup()
    has_built(job, groups)
    assert job.stand is not None
    if job.loads is not None:
        job.loads.put(loads)
    try:
        resized, prepared = _bring(job, process.survivor, meeting, is_verified=run.session.verify is not Verify.NOTHING)
    except StateMissing as why:
        if dist.get_rank() == 0:
            log.warning(f"every rank restarts, because {why}")
        process.survivor, process.before = None, ()
        process.start_over()
        return False
    args.num_floating_point_operations_so_far = meeting.run_totals
    recorder.begin(live, args, run.run_dir, lock)
    record_placement(live.record, live.iteration)
    connect(job)
    job.session = build_session(binding, run.session, names, prepared, is_resized=True)
    job.resized = replace(resized, usable_at=usable_at, brought_at=time.time())
    return True


def _bring(
    job: Job, survivor: SurvivorState | None, meeting: Meeting, *, is_verified: bool
) -> tuple[Resized, Prepared | None]:
    """Transfer the newest state from survivors. If survivors do not have all of it, prepare a recovery from snapshots.

    Returns:
        The state for :func:`take_up_resized`, and the prepared recovery. The recovery is None if the state was
        transferred.

    Raises:
        StateMissing: memory does not hold the whole state; every rank raises this error.
    """
    live, stand = job.live, job.stand
    assert stand is not None
    rebuilt: Rebuilt | None = None
    boundary = live_boundary(meeting, survivor, stand)
    try:
        if not all(all_gather_objects(boundary is not None, bool)):
            raise StateMissing("a pipeline stage has no survivor with the state of the newest iteration")
        exchanged = bring_live_state(live, stand, meeting.newest, survivor, is_verified=is_verified)
        iteration = meeting.newest
    except StateMissing as why:
        rebuilt = prepare_from_snapshots(
            survivor.kept_snapshots if survivor is not None else (),
            job.binding.states(),
            live.optimizer,
            stand,
            is_verified=is_verified,
        )
        boundary, exchanged = rebuilt.boundary, rebuilt.exchanged
        iteration = boundary["progress"]["iteration"]
        if dist.get_rank() == 0:
            log.info(f"{why}; snapshots restore the state after iteration {iteration}")
    assert boundary is not None
    job.binding.put_progress(boundary["progress"])
    resized = Resized(
        iteration, boundary=None if rebuilt is not None else boundary,
        is_between=meeting.is_between or iteration < meeting.newest, world_before=meeting.world_before,
        exchanged=exchanged, newest_outcome=meeting.newest_outcome if rebuilt is None else None,
    )  # fmt: skip
    return resized, None if rebuilt is None else rebuilt.prepared


def take_up_resized(process: Process, resized: Resized) -> None:
    """Restore the rest of the state after :func:`reassemble`, and begin training. Collective.

    Every rank calls it at the beginning of Megatron's training loop. If :func:`reassemble` prepared a recovery from
    snapshots, the recovery runs here.
    """
    job = process.job
    assert job.session is not None
    if resized.boundary is not None:
        job.binding.put_boundary(fitted(resized.boundary, job.live.optimizer))
        if (newest := resized.newest_outcome) is not None:
            norm = as_logged(newest.outcome.get("clip_norm"))
            job.ledger.replayed(resized.iteration, newest.losses, bool(newest.outcome.get("overflow")), norm)
    job.session.begin_training()
    job.has_begun = True  # The rank has its state from here on, even if a failure interrupts the rest of this function.
    process.before = process.survivor.kept_snapshots if process.survivor is not None else ()
    process.survivor, job.resized = None, None
    if job.loads is not None:
        job.loads.forget_replayed()
    report_resized(job, resized)
