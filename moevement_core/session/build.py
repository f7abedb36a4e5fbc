"""Construction of a session: this module makes all objects that save and recover one rank's state, one after the other.

An object is made after those that it uses. All collectives of the construction are here; the constructors of the parts
do not communicate. After a failure only replacements build a session; survivors keep theirs (:meth:`Session.rewire`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from moevement_core.comms import plain
from moevement_core.comms.address import own_address
from moevement_core.device import current_device
from moevement_core.engine.checkpointer import Checkpointer
from moevement_core.engine.config import KeepOwn
from moevement_core.engine.memory import SnapshotMemory
from moevement_core.engine.own import OwnSnapshots
from moevement_core.overhead.meter import OverheadMeter
from moevement_core.overhead.pause import Pause
from moevement_core.policy.schedule import Saved, ScheduleHistory
from moevement_core.rebuild.prepare import Prepared
from moevement_core.recovery import flips
from moevement_core.recovery.boundary_log import BoundaryLog
from moevement_core.recovery.formation_snapshots import FormationSnapshots
from moevement_core.replication.allowance import LOG, Allowance
from moevement_core.replication.interface import bytes_moved
from moevement_core.replication.pace import Pace
from moevement_core.saving.identity import JobNames
from moevement_core.saving.peers import Peers, ask_peers
from moevement_core.saving.progress_watch import ProgressWatch
from moevement_core.saving.reports import Reports
from moevement_core.saving.saving import (
    Joining,
    Saving,
    learned_record,
    refuse_what_is_not_defined,
    strategy_of,
    warn_of_copies,
)
from moevement_core.saving.windows import WindowDecisions
from moevement_core.saving.windows_on_disk import WindowsOnDisk
from moevement_core.session.drill import refuse_without_wipe
from moevement_core.session.loss_watch import LossWatch, refuse_if_unable
from moevement_core.session.session import Session
from moevement_core.session.speed_watch import SpeedWatch
from moevement_core.snapshot.arena import Arena
from moevement_core.snapshot.snapshot import BOUNDARY, StateTensor, aligned_bytes
from moevement_core.strategies import Strategy
from moevement_core.strategies.capabilities import LosesUpdates
from moevement_core.topology.host_budget import allowed
from moevement_core.topology.topology import connect
from moevement_core.trainer.capabilities import (
    SupportsCounts,
    SupportsExtraCapacity,
    SupportsPipeline,
    refuse_without_progress,
)
from moevement_core.trainer.config import SessionConfig
from moevement_core.trainer.interface import BindingInterface
from moevement_core.util.numa import bind_to_device

RECORD_SLACK_BYTES = 64 << 10
"""Bytes by which a boundary record may grow after it was measured."""


def build_session(
    binding: BindingInterface,
    config: SessionConfig,
    names: JobNames,
    prepared: Prepared | None = None,
    joining: Joining | None = None,
    snapshots_before: Sequence[FormationSnapshots] | None = None,
) -> Session:
    """Return the session of this rank. Collective: every rank of the job calls it at the same point.

    Args:
        binding: binding of the trainer.
        config: flags of the job.
        names: name of the job, and name of its current start, which differs after a restart from disk.
        prepared: recovery that :meth:`Session.begin_training` executes, for example from a window on disk; None without
            one.
        joining: on a replacement, what survivors know about the running job; None if the job starts.
        snapshots_before: in an elastic job that has just changed its ranks, snapshots from before the change; None
            otherwise. Such a job does not end if it has too few ranks for the copies that the flags ask for; it keeps
            fewer copies.

    Raises:
        ConfigError: the trainer lacks what the flags need, or memory or the folder for windows is missing. Every rank
            raises it.
    """
    is_resized = snapshots_before is not None
    refuse_without_wipe(binding, config.drill.wipe_at)
    refuse_if_unable(config.rollback, binding)
    device = current_device()
    bind_to_device(device)  # before threads start and host memory is allocated
    flips.begin(config.drill.flips)

    topology = connect(config, binding, is_running=joining is not None or is_resized)
    reports = Reports(binding, topology.rank)
    warn_of_copies(topology, reports)
    if joining is None:
        refuse_what_is_not_defined(binding, config.strategy)
        refuse_without_progress(binding)
    may_use = allowed(config.budget, topology.nodes, topology.rank, is_bounded=not config.strategy.kind.selects_by_load)
    allowance = Allowance(may_use.nbytes)

    strategy = strategy_of(config.strategy, binding, topology)
    caution = strategy.caution() if joining is None and isinstance(strategy, LosesUpdates) else None
    if caution is not None and topology.rank == 0:
        reports.report(caution)
    policy = None
    if joining is not None:
        policy = joining.policy_for(strategy, topology.most_operators)
        policy = replace(policy, failures=policy.failures + 1)
    began_at = binding.iteration if policy is None else policy.began_at
    pause = Pause()
    meter = OverheadMeter(began_at, pause)
    counts, share = None, config.strategy.capacity_boost
    if strategy.counts is not None and isinstance(binding, SupportsCounts):
        counts = binding.counts(topology.table, strategy.counts)
    room = None
    if share is not None and isinstance(binding, SupportsExtraCapacity):
        room = binding.expert_room(topology.table, share)
    sent_bytes = binding.sent_bytes if isinstance(binding, SupportsPipeline) and not strategy.rolls_back_all else 0
    windows = WindowDecisions(
        strategy, meter=meter, counts=counts, room=room, topology=topology,
        budget=config.budget, allowed=may_use, report=reports.report,
        sent_bytes=sent_bytes, asked_window=config.strategy.window,
        to_disk=config.disk.persist_dir is not None, began_at=began_at, default_cap=config.strategy.default_cap,
    )  # fmt: skip
    if policy is not None:
        windows.join(policy)

    states, has_parity = binding.states(), config.copies.protection.parity is not None
    memory = SnapshotMemory(
        states, _record_bytes(binding, strategy), to_disk=config.disk.persist_dir is not None, is_summed=has_parity
    )
    if policy is None:
        history = windows.first(binding.iteration, memory, is_running=is_resized)
    else:
        history, memory.keeps_own_copies = ScheduleHistory(*policy.schedules), policy.keeps_own_copies
    allowance.keep(LOG, max(map(windows.log_bytes, history.all)))
    boundary_log = None
    if topology.pipeline.stages > 1 and not strategy.rolls_back_all:
        most = config.budget.log_memory_bytes
        boundary_log = BoundaryLog(device, lambda: min(most, allowance.left_for(LOG)), reports.report)
        binding.boundary_log = boundary_log

    own = OwnSnapshots(Arena(device))
    peers = Peers(device, own, report=reports.report, pace=_pace(config, strategy), pause=pause)
    senders, receivers = peers.connect(topology, allowance, ())
    checkpointer = Checkpointer(
        rank=topology.rank,
        states=states,
        own=own,
        strategy=strategy,
        history=history,
        device=device,
        senders=senders,
        receivers=receivers,
        agreement=topology.channels.agreement,
        memory=memory,
        allowance=allowance,
        report=reports.report,
        has=ask_peers(topology, {}) if policy is not None else {},
        needed=policy.needed if policy is not None else None,
        pause=pause,
        may_give_up_own=config.budget.keep_own is KeepOwn.AUTO and config.disk.persist_dir is None and not has_parity,
        give_up_log=_give_up_log(boundary_log, allowance),
    )
    disk = WindowsOnDisk(
        binding,
        names,
        config=config,
        topology=topology,
        checkpointer=checkpointer,
        reports=reports,
        job_name=policy.disk_job if policy is not None else "",
        began_at=began_at,
    )
    watch = ProgressWatch(
        checkpointer=checkpointer,
        reports=reports,
        peer_timeout_s=config.timeouts.peer_s,
        announced=policy.announced if policy is not None else None,
        meter=meter,
        cap=config.strategy.kept_cap,
    )
    saving = Saving(
        binding=binding,
        config=config,
        topology=topology,
        reports=reports,
        allowed=may_use,
        allowance=allowance,
        meter=meter,
        windows=windows,
        peers=peers,
        states=states,
        checkpointer=checkpointer,
        disk=disk,
        watch=watch,
        policy=policy,
    )
    if joining is None:
        saving.start()
    speed = SpeedWatch(device, reports, binding, config.speed)
    loss_watch = LossWatch(config.rollback, saving, names.rollback)
    return Session(
        binding, config, saving, speed=speed, loss_watch=loss_watch, prepared=prepared,
        snapshots_before=snapshots_before or (), is_first=joining is None,
    )  # fmt: skip


def _record_bytes(binding: BindingInterface, strategy: Strategy) -> int:
    """Return the bytes to reserve for boundary records."""
    _, tensors = plain.flatten({"boundary": binding.boundary(), **learned_record(strategy)})
    return aligned_bytes(StateTensor(BOUNDARY, Saved.FULL, "", tensor) for tensor in tensors) + RECORD_SLACK_BYTES


def _pace(config: SessionConfig, strategy: Strategy) -> Pace | None:
    """Return the timing of sends within an iteration; None if the strategy sends at any time, or none is possible."""
    if strategy.paces_copies and (moved := bytes_moved(own_address(config.copies.interfaces))) is not None:
        return Pace(moved)
    return None


def _give_up_log(log: BoundaryLog | None, allowance: Allowance) -> Callable[[int], None]:
    """Return a function that lets snapshots take host memory from the boundary log when memory runs out."""

    def give_up(nbytes: int) -> None:
        if log is None:
            return
        less = max(0.0, allowance.of(LOG) - nbytes)
        allowance.keep(LOG, less)
        log.give_up(less)

    return give_up
