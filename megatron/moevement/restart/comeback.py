"""After a failure: who knows what, which iteration everybody comes to, and how (DESIGN section 8).

Survivors say which iteration they have committed last. Those that had brought everything to a step that others made
follow them; who lost its state, and the stage around it, is to replay. All this happens where Megatron sets up its
model, before data is opened; the replay itself happens inside Megatron's training loop.
"""

from __future__ import annotations

import functools
import inspect
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.moevement.arguments import RunConfig
from megatron.moevement.optimizer.commit import Mark
from megatron.moevement.restart import in_process as restart
from megatron.moevement.restart import injection, leftovers, megatron_state
from megatron.moevement.runtime import recorder, sparse
from megatron.moevement.runtime.boundary import boundary_copy, put_boundary_state, put_progress
from megatron.moevement.runtime.dense_checkpoint import TRACKER
from megatron.moevement.runtime.identity import job_name
from megatron.moevement.runtime.job import Job, current_job, start_job
from megatron.moevement.runtime.kept import Kept
from megatron.moevement.runtime.policy import Policy, agree
from megatron.moevement.runtime.ranks import tell_all
from megatron.moevement.runtime.recovery import Prepared
from megatron.moevement.runtime.replay import TrainLoop
from megatron.moevement.runtime.rooms import Rooms
from moevement_core.errors import RecoveryError
from moevement_core.injection import Phase
from moevement_core.recovery.account import Account
from moevement_core.recovery.agree import NothingToResume, RankStatus, decide, peer_of_follower
from moevement_core.recovery.outcome import Recovery
from moevement_core.rendezvous.roster import Death, NoticedBy

Setup = Callable[[], tuple[list[Any], Any, Any]]
"""Megatron's own way to model, optimizer and scheduler."""


@dataclass(frozen=True)
class RankReport:
    """What a rank reports to all others when ranks meet after a failure."""

    status: RankStatus
    outcome: Mapping[str, Any] = field(default_factory=dict)
    """Of the step of the iteration that it committed last."""
    scalers: Sequence[Any] = ()
    progress: Mapping[str, int] = field(default_factory=dict)
    """Right after it, before anything that is due then."""
    begun_progress: Mapping[str, int] | None = None
    """Where the next iteration began, if it had begun it: everything that was due had been done."""
    flops: float = 0.0
    keeps: sparse.Copies = field(default_factory=dict)
    parameter_keys: Sequence[Any] = ()
    policy: Policy | None = None
    goal: RankReport | None = None
    """Of a rank that had committed the iteration which this one was on its way back to when a further failure came."""


@dataclass(frozen=True)
class Comeback:
    """What was agreed on, the same on every rank but for what is prepared."""

    until: int
    """The iteration that everybody comes to."""
    lost: frozenset[int]
    """Pipeline stages that replay."""
    prepared: Prepared | None
    """Nothing if no stage lost its state."""
    reached: RankReport
    """Of a rank that has committed ``until``."""
    is_between: bool
    """Whether what is due between ``until`` and the next iteration (evaluation, dense save) may be undone yet."""
    usable_at: float
    """When process groups were usable again, seconds since the epoch."""
    prepared_at: float
    """When everything was prepared here."""


def record_setup(original: Callable[..., Any], begin: Callable[[Job, Setup], None]) -> Callable[..., Any]:
    """``setup_model_and_optimizer`` that keeps what it built, and after a failure keeps what is there.

    Args:
        original: Megatron's.
        begin: sets a job up from its start.
    """

    @functools.wraps(original)
    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        def setup() -> tuple[list[Any], Any, Any]:
            return original(*args, **kwargs)

        job = current_job()
        now = restart.generation()
        groups = megatron_state.Groups.now() if now is not None else None
        if now is None or now.roster.generation == 0 or not rejoin(job, setup, groups):
            job = current_job()
            _put_progress_of_start()
            with job.rooms.aside() as room:
                _share_parameter_keys(room, job.parameter_keys, ())
                begin(job, setup)
            job.groups = [groups] if groups is not None else []
            job.config = leftovers.config_of(job)
        job = current_job()
        return job.model, job.optimizer, job.scheduler

    return setup_model_and_optimizer


_START: dict[str, Any] = {}
"""What Megatron's arguments said of progress before the first start of this process."""


def _put_progress_of_start() -> None:
    """A start is the first one again, however far the job had come before."""
    from megatron.core.num_microbatches_calculator import update_num_microbatches
    from megatron.training import get_args

    args = get_args()
    if not _START:
        names = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples", "iteration")
        _START.update({name: getattr(args, name) for name in names if hasattr(args, name)})
        return
    for name, value in _START.items():
        setattr(args, name, value)
    update_num_microbatches(args.consumed_train_samples, consistency_check=False)


def rejoin(job: Job, setup: Setup, groups: Any) -> bool:
    """Meet the others after a failure and find the way back; whether there is one. Every rank calls it.

    Where nothing was committed ``job`` is a new one, to be set up from its start.

    Raises:
        RecoveryError: nobody has what is needed. When ranks meet next they set up the job from its start: from windows
            on disk, from a dense checkpoint, or from the seed.
    """
    from megatron.core.num_microbatches_calculator import update_num_microbatches
    from megatron.training import get_args

    usable_at = time.time()
    args = get_args()
    reports: list[RankReport] = tell_all(_report(job))
    statuses = [report.status for report in reports]
    try:
        point = decide(statuses)
    except NothingToResume as why:
        _start_over(str(why))
        return False
    until = point.iteration
    injection.at(Phase.RECOVER, until)
    reference = reports[point.reference]
    if point.reference_is_goal:
        assert reference.goal is not None
        reference = reference.goal
    rank = dist.get_rank()
    if job.begun:
        # A further failure may have come while references were being replaced; then there are some to each.
        job.groups.append(groups)
        for old in job.groups[:-1]:
            megatron_state.move_to_groups(old, groups)
    else:
        _put_progress_of_start()  # this process may have been on its way before
        job.name = job_name() or ""
        survivor = next(report for report in reports if report.status.was_training)
        is_as_then = _build(job, setup, args, survivor.parameter_keys)
    job.groups = [groups]
    if rank in point.followers:
        assert job.sparse is not None
        peer = peer_of_follower(rank, statuses, point)
        outcome = (reports[peer] if peer is not None else reference).outcome
        job.sparse.commit.follow(until, outcome, list(reference.scalers))
    leftovers.clear_gradients(job)
    stage = statuses[rank].stage
    adopted, same_stage = agree(
        stage, [(report.status.stage, report.policy) for report in reports if report.policy is not None]
    )
    kept = [report.keeps for report in reports]
    if job.begun:
        assert job.sparse is not None
        job.sparse.rewire(adopted, kept)
    else:
        config = RunConfig.from_args(args).sparse
        assert config is not None
        job.sparse = sparse.start(job, config, None, adopted=adopted, same_stage=same_stage, kept=kept)
        if is_as_then:
            job.sparse.take_start()
    put_progress(job, reference.progress if point.is_between else reference.begun_progress or reference.progress)
    args.iteration, args.num_floating_point_operations_so_far = until, reference.flops
    update_num_microbatches(args.consumed_train_samples, consistency_check=False)
    recorder.go_on_with_record(job, args)
    job.sparse.disk.start()
    prepared = None
    if point.lost_stages:
        try:
            with restart.waiting_for_others():
                prepared = job.sparse.prepare(until, point.lost_stages)
        except RecoveryError:
            # What was wired for coming back is of no use: ranks meet once more, and then nobody has begun.
            job.begun = False
            raise
    if stage not in point.lost_stages:
        job.sparse.commit.gather(now=True)
    job.comeback = Comeback(until, point.lost_stages, prepared, reference, point.is_between, usable_at, time.time())
    return True


def _report(job: Job) -> RankReport:
    from megatron.core import parallel_state
    from megatron.training import get_args

    status = RankStatus(
        stage=parallel_state.get_pipeline_model_parallel_rank(),
        replica=min(dist.get_process_group_ranks(parallel_state.get_model_parallel_group())),
    )
    run = job.sparse
    if not job.begun or run is None:
        return RankReport(status)
    status = replace(status, was_training=True, began_at=run.began_at)
    kept = RankReport(status, keeps=run.keeps(), parameter_keys=job.parameter_keys, policy=run.policy())
    mark = run.commit.mark if not run.commit.torn else None
    if mark is None:
        goal = job.comeback.reached if job.comeback is not None else None
        return replace(kept, status=replace(status, goal=goal.status if goal is not None else None), goal=goal)
    return replace(
        kept,
        status=replace(status, committed=mark.iteration, has_begun_next=mark.resumed is not None),
        outcome=mark.outcome,
        scalers=mark.boundary["loss_scalers"],
        progress=mark.boundary["progress"],
        begun_progress=mark.resumed["progress"] if mark.resumed is not None else None,
        flops=get_args().num_floating_point_operations_so_far,
    )


def _start_over(why: str) -> None:
    """Forget everything, on every rank alike; the job is then set up from its newest state on disk, or its start."""
    if dist.get_rank() == 0:
        print(f"moevement: every rank restarts, because {why}", flush=True)
    start_job()


def _build(job: Job, setup: Setup, args: Namespace, parameter_keys: Sequence[Any]) -> bool:
    """Model, optimizer and scheduler on a rank that is new, without a word from the others; their state comes later.

    Returns:
        Whether they are what they were when the job began. Not if weights would have come from other ranks.
    """
    load, pretrained = args.load, args.pretrained_checkpoint
    with job.rooms.aside() as room:
        for name in ("load", "pretrained_checkpoint"):
            room.put(args, name, None)
        _share_parameter_keys(room, job.parameter_keys, parameter_keys)
        asked = _ask_nobody(room)
        job.model, job.optimizer, job.scheduler = setup()
    job.config = leftovers.config_of(job)
    return not asked and load is None and pretrained is None


def _ask_nobody(room: Rooms) -> list[str]:
    """Reductions and broadcasts do nothing: tied embeddings, say, are summed over two stages when a model is built.

    Returns the names of those that are called, as they are.
    """
    asked: list[str] = []
    for name in ("all_reduce", "broadcast"):
        room.put(dist, name, lambda *args, name=name, **kwargs: asked.append(name))
    return asked


def _share_parameter_keys(room: Rooms, record: list[Any], given: Sequence[Any]) -> None:
    """Megatron's optimizer asks all ranks for the keys of their parameters: keep the answers, or give those of then.

    They are the same on every rank. A rank that is new in a running job would ask alone.
    """
    original, answers = dist.all_gather_object, iter(given)

    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        if given:
            object_list[:] = next(answers)
        else:
            original(object_list, obj, group)
        record.append(list(object_list))

    room.put(dist, "all_gather_object", all_gather_object)


# Inside the training loop


def enter_loop(original: Callable[..., Any]) -> Callable[..., Any]:
    """``train``, before whose first iteration state comes back; its arguments are what a replay runs its steps with."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def train(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        job = current_job()
        job.loop = TrainLoop(
            *(given.arguments[name] for name in ("forward_step_func", "config", "p2p_communicator", "pg_collection"))
        )
        if job.comeback is not None:
            bring_back(job, given)
        elif job.sparse is not None:
            job.sparse.begin_training()
        job.begun = True
        if (now := restart.generation()) is not None:
            job.resumed_in = now.roster.generation
        return original(*args, **kwargs)

    return train


def bring_back(job: Job, train: inspect.BoundArguments) -> None:
    """Replay what was lost, put every rank at the boundary that was agreed on, and do what was due there.

    Every rank calls it, inside Megatron's training loop, before its first iteration.
    """
    comeback, run = job.comeback, job.sparse
    assert comeback is not None
    assert run is not None
    replay_at, recovery = time.time(), None
    if comeback.prepared is not None:
        is_lost = run.wiring.stage in comeback.lost
        if is_lost:
            run.commit.mark = None  # until it is back
        with restart.waiting_for_others():
            last = {comeback.until: {"step": comeback.reached.outcome}}
            recovery = run.carry_out(replace(comeback.prepared, outcomes=last | dict(comeback.prepared.outcomes)))
        if is_lost:
            live = boundary_copy(job)
            resumed = None if comeback.is_between else live
            run.commit.mark = Mark(comeback.until, live, comeback.reached.outcome, resumed)
    mark = run.commit.mark
    assert mark is not None
    boundary = mark.boundary if comeback.is_between or mark.resumed is None else mark.resumed
    put_boundary_state(job, boundary)
    kept = run.check_kept(comeback.until, comeback.prepared)
    run.begin_anew(comeback.until)
    recorder.complete_metrics(job, comeback.until, mark.outcome)
    job.replayed_lines.clear()
    _tell(job, comeback, recovery, kept, replay_at)
    if comeback.is_between:
        _do_what_is_due(comeback.until, train)
    job.comeback = None


def _tell(job: Job, comeback: Comeback, recovery: Recovery | None, kept: Kept, replay_at: float) -> None:
    """What the operator of the job sees; every rank calls it."""
    now, run = restart.generation(), job.sparse
    assert now is not None
    assert run is not None
    mine = (
        now.interrupted_at, comeback.usable_at, comeback.prepared_at, replay_at, time.time(), run.windows.iteration_s,
        run.copies_missing,
    )  # fmt: skip
    *times, iteration_s, missing = zip(*tell_all(mine), strict=True)
    interrupted_at, usable_at, prepared_at, began_at, resumed_at = (max(its) for its in times)
    roster = now.roster
    failed_at = min((_lost_at(death) for death in roster.deaths), default=interrupted_at)
    iterations_s = max(iteration_s) * (comeback.until - run.began_at)
    account = Account(
        generation=roster.generation,
        failures=[_failure(death) for death in roster.deaths] or list(roster.reasons),
        noticed_by=_noticed_by(roster.deaths),
        failed_at=failed_at,
        interrupted_at=max(interrupted_at, failed_at),
        left_at=max(roster.left_at, interrupted_at),
        formed_at=roster.formed_at,
        usable_at=usable_at,
        prepared_at=prepared_at,
        replay_at=began_at,
        resumed_at=resumed_at,
        scope=_scope(comeback, run, recovery),
        recovery=recovery.as_dict() if recovery is not None else None,
        effective=iterations_s / (resumed_at - roster.first_formed_at) if iterations_s else None,
        kept=str(kept),
        spares=roster.spares,
        copies=f"{sum(missing)} snapshots are being brought to peers again" if sum(missing) else "all are there",
        earlier=[_failure(death) for death in roster.earlier],
        first_failed_at=min(map(_lost_at, roster.earlier), default=None),
    )
    if dist.get_rank() == 0:
        for line in account.lines():
            print(f"moevement: {line}", flush=True)
    job.event("failure", **account.as_dict())


def _lost_at(death: Death) -> float:
    """When a member was lost, as far as anybody knows: seen to end, or heard of for the last time."""
    return death.at if death.noticed_by == NoticedBy.SUPERVISOR else death.last_seen


_NOTICED = {
    NoticedBy.SUPERVISOR: "supervisor, which saw the process end",
    NoticedBy.RESET: "reset of the supervisor's connection",
    NoticedBy.LEASE: "lease that ran out",
    NoticedBy.TIMEOUT: "timeout: it did not answer",
}


def _noticed_by(deaths: Sequence[Death]) -> str:
    """By what, and how many seconds after the last word of those that are lost."""
    if not deaths:
        return "by a rank that lives: an error there, or no progress for the hang timeout"
    slowest: dict[str, float] = {}
    for death in deaths:
        seconds = death.at - _lost_at(death)
        slowest[death.noticed_by] = max(seconds, slowest.get(death.noticed_by, 0.0))
    return "by " + ", ".join(f"{_NOTICED[NoticedBy(by)]} ({seconds:.1f} s)" for by, seconds in slowest.items())


def _failure(death: Death) -> str:
    who = f"rank {death.rank}" if death.rank is not None else "a spare"
    return f"{who} (pid {death.pid}) {death.how}"


def _scope(comeback: Comeback, run: sparse.SparseRun, recovery: Recovery | None) -> str:
    stages = run.wiring.pipeline.stages
    if recovery is None:
        return f"none of {stages} stages lost its state"
    lost = ", ".join(str(stage) for stage in sorted(comeback.lost))
    replayed = [stage for stage, count in recovery.replayed_by_stage.items() if count]
    if len(replayed) == stages and len(comeback.lost) < stages:
        return f"stage {lost} of {stages} lost its state; all stages rolled back"
    return f"stage {lost} of {stages} lost its state; {'all' if len(replayed) == stages else 'only it'} rolled back"


def _do_what_is_due(iteration: int, train: inspect.BoundArguments) -> None:
    """The evaluation and the dense save after ``iteration``, which the failure may have cut off."""
    from megatron.training import get_args, get_timers, training

    args, given = get_args(), train.arguments
    start = args.start_eval_at_iter
    due = args.eval_interval and args.do_valid and iteration % args.eval_interval == 0
    if due and (start is None or iteration >= start):
        training.evaluate_and_print_results(
            f"iteration {iteration}", given["forward_step_func"], given["valid_data_iterator"], given["model"],
            iteration, given["process_non_loss_data_func"], given["config"], verbose=False, write_to_tensorboard=True,
            non_loss_data_func=given["non_loss_data_func"], pg_collection=given["pg_collection"],
            p2p_communicator=given["p2p_communicator"],
        )  # fmt: skip
    if args.save and args.save_interval and _overdue(Path(args.save), iteration, args.save_interval):
        interval = get_timers()("interval-time", log_level=0)
        interval.start(barrier=True)  # the save interrupts it, and Megatron's loop has not begun it yet
        training.save_checkpoint_and_time(
            iteration, given["model"], given["optimizer"], given["opt_param_scheduler"],
            args.num_floating_point_operations_so_far, given["checkpointing_context"],
            train_data_iterator=given["train_data_iterator"],
        )  # fmt: skip
        interval.stop()


def _overdue(folder: Path, iteration: int, interval: int) -> bool:
    """Whether the newest save that was due is not there; one answer for all ranks."""
    tracker = folder / TRACKER
    text = tracker.read_text().strip() if tracker.exists() else ""
    saved = int(text) if text.isdigit() else 0
    return bool(tell_all(saved < iteration - iteration % interval)[0])
