"""Choice of the window on disk that a job starts from.

The first start of a job searches the folder of ``--moevement-load``. A restart first searches the folder that the job
itself writes windows to. If the job has neither a window there nor a dense checkpoint that it saved, the restart then
searches the folder of ``--moevement-load``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import torch.distributed as dist

from moevement_core import log
from moevement_core.comms.address import own_address
from moevement_core.comms.connections import Address, Connections
from moevement_core.comms.exchange import all_gather_objects, from_rank_zero
from moevement_core.errors import ConfigError, RecoveryError
from moevement_core.recovery import flips
from moevement_core.saving.folder import START_PATIENCE_S, SharedFolder, find_folder
from moevement_core.saving.identity import JobNames
from moevement_core.saving.rollback import RollbackDecision, choose_once
from moevement_core.saving.window_files import Loaded, load_newest, windows_of_all
from moevement_core.storage.manifest import SKIPPED, Manifest, is_of_job
from moevement_core.trainer.capabilities import leave_out
from moevement_core.trainer.config import SessionConfig
from moevement_core.trainer.interface import BindingInterface
from moevement_core.util.words import counted


def load_window(
    binding: BindingInterface,
    config: SessionConfig,
    names: JobNames,
    *,
    is_resumed: bool,
    asked_step: int | None = None,
) -> Loaded | None:
    """Load the window that the job starts from, and set the job's progress to the window's. Every rank calls it.

    Call it before the trainer opens its data. The training loop restores the state later, by a replay of the window.

    Args:
        binding: binding of this rank; its iteration is the one that the job would otherwise start from.
        config: flags of the job.
        names: names of the job.
        is_resumed: True if the trainer has loaded a dense checkpoint that this job saved.
        asked_step: value of ``--ckpt-step``. The job then starts from that dense checkpoint, and ignores windows of
            other jobs. None to start from the newest state.

    Returns:
        Window; None if the job starts without one.

    Raises:
        ConfigError: the windows belong to a job with other settings.
        RecoveryError: windows exist, but none of them is complete.
    """
    flips.begin(config.drill.flips)
    if asked_step is not None and config.disk.load_iteration is not None:
        raise ConfigError(
            f"--moevement-load-iteration {config.disk.load_iteration} with --ckpt-step {asked_step}; a job starts from "
            "one of the two, so leave the other out"
        )
    host = own_address()
    if names.rollback is not None:
        decision = _gone_back(names.name, names.rollback, config)
        names = replace(names, rollback=decision)
        leave_out(binding, decision.left_out)
    loaded = _load_own(binding, config, names=names, host=host) if names.is_restart else None
    if loaded is None and asked_step is not None and config.disk.load is not None and dist.get_rank() == 0:
        log.info(
            f"--ckpt-step {asked_step}: the job starts from this checkpoint, not from a window in --moevement-load "
            f"{config.disk.load}; leave --ckpt-step out to start from the newest window"
        )
    if loaded is None and not is_resumed and asked_step is None:
        loaded = _load_named(binding, config, names=names, host=host)
    if loaded is not None:
        binding.put_progress(loaded.manifest.progress)
    return loaded


def _load_own(binding: BindingInterface, config: SessionConfig, names: JobNames, host: str) -> Loaded | None:
    """Return the newest usable window of an earlier start of this job; None without one.

    If windows exist but none of them is usable, rank 0 logs the reason.
    """
    template = config.disk.persist_dir
    if template is None:
        return None
    node = config.copies.node_of(dist.get_rank())
    try:
        place = find_folder("--moevement-persist-dir", template, node, START_PATIENCE_S)
        return _load(
            binding, config, host, place, is_wanted=lambda manifest: _is_own(manifest, names),
            after=binding.iteration,
        )  # fmt: skip
    except (ConfigError, RecoveryError) as error:  # raised on every rank
        if dist.get_rank() == 0:
            log.warning(f"no window of this job can be used: {error}")
        return None


def _gone_back(job: str, decision: RollbackDecision, config: SessionConfig) -> RollbackDecision:
    """Choose the window to which the job rolls back, and delete the windows that it goes back from. Collective.

    Args:
        job: name of the job.
        decision: decision to roll back.
        config: flags of the job.

    Returns:
        The decision, with the iteration that the chosen window restores.
    """
    template = config.disk.persist_dir
    assert template is not None
    node = config.copies.node_of(dist.get_rank())
    try:
        place = find_folder("--moevement-persist-dir", template, node, START_PATIENCE_S)
    except ConfigError as error:  # raised on every rank
        if dist.get_rank() == 0:
            log.warning(f"the job does not roll back, because its windows cannot be read: {error}")
        return decision
    windows = [each for each in windows_of_all(place) if is_of_job(each.name, job)]
    restorable = [each.reaches for each in windows if decision.is_earlier(each.job)]
    decision = replace(decision, restores=from_rank_zero(lambda: choose_once(decision, restorable), int | None))
    for window in windows:
        if place.is_first and decision.is_undone(window.job, window.reaches):
            with suppress(OSError):
                place.store.remove(window.name)
    if dist.get_rank() == 0:
        log.info(f"the job leaves out {counted(len(decision.left_out), 'iteration')} up to {decision.spiked}")
    return decision


def _is_own(manifest: Manifest, names: JobNames) -> bool:
    """Return True if an earlier start of the job wrote the window, and the job has not gone back from it."""
    if not is_of_job(manifest.name, names.name):
        return False
    return names.rollback is None or not names.rollback.is_undone(manifest.job, manifest.reaches)


def _load_named(binding: BindingInterface, config: SessionConfig, names: JobNames, host: str) -> Loaded | None:
    """Return the newest window of other jobs in the folder of ``--moevement-load``; None without one."""
    template, wanted = config.disk.load, config.disk.load_iteration
    if template is None:
        return None
    rank, iteration = dist.get_rank(), binding.iteration
    node = config.copies.node_of(rank)
    place = find_folder("--moevement-load", template, node, START_PATIENCE_S, is_written=False)
    if config.rollback.is_on:
        _leave_out_again(binding, place, names, wanted)
    if wanted is not None:
        return _load_asked(binding, config, host, place, wanted=wanted)
    loaded = _load(
        binding, config, host, place, is_wanted=lambda manifest: not is_of_job(manifest.name, names.name),
        after=binding.iteration,
    )  # fmt: skip
    if loaded is None and rank == 0:
        began = f"iteration {iteration} of --load" if iteration else "fresh weights"
        log.info(
            f"no window in --moevement-load {place.store} is newer than iteration {iteration}; "
            f"the job starts from {began}"
        )
    return loaded


def _leave_out_again(binding: BindingInterface, place: SharedFolder, names: JobNames, wanted: int | None) -> None:
    """Leave out the iterations that the job before has left out, so that a requeued job repeats its window. Collective.

    Args:
        binding: binding of this rank.
        place: folder of the windows.
        names: names of the job.
        wanted: iteration of the window; None for the newest one.
    """
    for window in windows_of_all(place):  # the newest first
        if window.reaches == wanted or (wanted is None and not is_of_job(window.name, names.name)):
            skipped = window.settings.get(SKIPPED) or ()
            leave_out(binding, [iteration for iteration in skipped if iteration <= window.reaches])
            return


def _load_asked(
    binding: BindingInterface, config: SessionConfig, host: str, place: SharedFolder, wanted: int
) -> Loaded:
    """Return the window that restores iteration ``wanted``, for ``--moevement-load-iteration``.

    Raises:
        ConfigError: the folder has no such window. Every rank raises it.
    """
    loaded = _load(
        binding, config, host, place, is_wanted=lambda manifest: manifest.reaches == wanted, after=wanted - 1
    )
    if loaded is None:
        others = sorted({manifest.reaches for manifest in windows_of_all(place)})
        has = f"windows of iterations {', '.join(map(str, others))}; give one of these" if others else "no windows"
        raise ConfigError(f"--moevement-load-iteration {wanted}: --moevement-load {place.store} has {has}")
    return loaded


def _load(
    binding: BindingInterface,
    config: SessionConfig,
    host: str,
    place: SharedFolder,
    is_wanted: Callable[[Manifest], bool],
    after: int,
) -> Loaded | None:
    connections = Connections(host)
    try:
        connections.open(dist.get_rank(), all_gather_objects(connections.address, Address))
        return load_newest(
            place, stage=binding.place().stage, settings=binding.settings(), transport=connections.channel("windows"),
            is_wanted=is_wanted, after=after, elastic=binding if config.elastic.is_elastic else None,
        )  # fmt: skip
    finally:
        connections.close()
