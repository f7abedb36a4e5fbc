"""Fault-tolerant training loop for scripts that write their own loop; ``examples/plain_torch`` uses it.

A script describes its trainer in a :class:`~moevement_core.trainer.binding.Binding`, and calls :func:`train` with a
loop::

    def loop(session):
        for iteration in iterations(session, until=100):
            session.binding.run(iteration)
            session.step()

A trainer whose loop belongs to a framework, like Megatron's, makes the same calls from hooks of that loop.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, override

import torch
import torch.distributed as dist

from moevement_core import log
from moevement_core.comms.address import store_address
from moevement_core.device import visible_devices
from moevement_core.elastic.config import SWITCH
from moevement_core.errors import ConfigError
from moevement_core.recovery.agree import NothingToResume
from moevement_core.rendezvous.config import LEASES_TO_HANG
from moevement_core.rendezvous.resizing import Grid
from moevement_core.rendezvous.store import connect_store
from moevement_core.restart import injection
from moevement_core.restart.communicators import make_communicators
from moevement_core.restart.faults import Phase
from moevement_core.restart.generation import generation
from moevement_core.restart.in_process import is_restarted_in_process, run_through_failures
from moevement_core.restart.training import GuardSettings, Training
from moevement_core.run.events import Ended, Restarted
from moevement_core.saving.identity import JobNames, agree_on_names, job_name
from moevement_core.saving.store_check import check_stores
from moevement_core.saving.window_start import load_window
from moevement_core.session.after_failure import take_up
from moevement_core.session.build import build_session
from moevement_core.session.kept_state import Resizing
from moevement_core.session.rejoin import Rejoined, Unrecoverable
from moevement_core.session.resize import Offer, Rebuilder, ResizedSession, resize
from moevement_core.session.run_directory import (
    Lines,
    begin_record,
    continue_record,
    lock_run_directory,
    plain_config,
    state_digest,
)
from moevement_core.session.session import Session
from moevement_core.trainer.capabilities import iterations_left_out, regroup
from moevement_core.trainer.config import SessionConfig
from moevement_core.trainer.interface import BindingInterface
from moevement_core.util.lock import FolderLock

TIMEOUT = timedelta(minutes=10)
"""Timeout of collectives. After a failure, the restart guard interrupts them much sooner."""


def train(
    make: Callable[[], BindingInterface],
    config: SessionConfig,
    loop: Callable[[Session], Any],
    backend: str,
    run_dir: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    sizes: Sequence[int] = (),
    make_groups: Callable[[], object] = lambda: None,
) -> Any:
    """Run ``loop`` to its end through any number of failures. Each process of the job calls it once.

    Args:
        make: function that makes the trainer, with model and optimizer in the state in which the job begins. It is
            called when process groups are usable, and once more if the job lost all state. A replacement calls it
            while other ranks do not, so it must not communicate.
        config: flags of the job.
        loop: function that trains. It is called in every generation, with :attr:`Session.binding` at the iteration to
            resume from.
        backend: backend of the default process group.
        run_dir: folder for metrics, events and a summary; None to record nothing.
        flags: flags of the script, to be recorded in the run's ``config.yaml``.
        sizes: numbers of ranks with which the job may continue, ascending. ``--moevement-elastic`` needs them. The
            trainer should train on the same global batch with each number of ranks.
        make_groups: function that makes the process groups or device meshes that the trainer needs beside the default
            group. Every rank calls it in every generation, before anything else, so it may communicate. It makes the
            same groups in the same order. Then they have the names of those from before the failure, by which device
            meshes find their groups.

    Returns:
        Result of ``loop``.

    Raises:
        ConfigError: the job cannot begin with these flags. Every rank raises it.
        SystemExit: the job ended, and ``loop`` has no result in this process, for example in an unused spare.
    """
    if config.elastic.is_elastic:
        _refuse_fixed_size(sizes)
    training = _Loop(
        make, config, loop=loop, backend=backend, run_dir=run_dir, flags=plain_config(flags or {}), sizes=sizes,
        make_groups=make_groups,
    )  # fmt: skip
    if is_restarted_in_process():
        return run_through_failures(training)
    address = store_address()
    return training.enter(connect_store(address) if address is not None else None)


def _refuse_fixed_size(sizes: Sequence[int]) -> None:
    """Refuse an elastic job whose number of ranks cannot change.

    Raises:
        ConfigError: the script gives no sizes, or no launcher can form the job again.
    """
    if not sizes:
        raise ConfigError(
            f"{SWITCH}: the script gives no numbers of ranks; pass sizes to moevement_core.train, or leave {SWITCH} out"
        )
    if not is_restarted_in_process():
        raise ConfigError(
            f"{SWITCH} without `moevement launch`, which re-forms the job; use the command, or leave the flag out"
        )


def iterations(session: Session, until: int) -> Iterator[int]:
    """Yield the number of each remaining iteration, and call the session before and after the iteration.

    The body of the ``for`` loop has to call ``session.step`` exactly once. If the launcher receives SIGTERM, the loop
    ends early, after the same iteration on all ranks.

    The body puts the losses of each iteration into :attr:`Binding.losses`, and this function writes them to the
    metrics. A replay also puts its losses there, and the recovery compares them with the recorded losses.

    Args:
        session: session of this generation.
        until: number of the last iteration.

    Yields:
        Number of the iteration to execute.

    Raises:
        RuntimeError: the body did not call ``session.step``, or called it more than once.
    """
    binding = session.binding
    while binding.iteration < until:
        committed = binding.iteration
        if committed + 1 in iterations_left_out(binding):
            binding.iteration = committed + 1
            continue
        session.begin_iteration(committed)
        began = time.perf_counter()
        injection.at(Phase.FORWARD)
        yield committed + 1
        if binding.iteration != committed + 1:
            raise RuntimeError(f"iteration {committed + 1} must call session.step() exactly once; the loop did not")
        step_s = time.perf_counter() - began
        losses = {name: torch.as_tensor(value) for name, value in binding.losses.get(committed + 1, {}).items()}
        session.end_iteration(committed + 1, step_s, {"skipped": False, "grad_norm": None, "losses": losses})
        Lines(binding, session.saving.began_at).write(committed + 1, iteration_s=step_s, **session.metrics())
        if session.saving.checkpointer.progress.is_winding_down:
            return


class _Loop(Training, Rebuilder):
    """Training loop of a script. The in-process restart calls :meth:`enter` once in each generation."""

    def __init__(
        self,
        make: Callable[[], BindingInterface],
        config: SessionConfig,
        loop: Callable[[Session], Any],
        backend: str,
        run_dir: Path | None,
        flags: Mapping[str, Any],
        sizes: Sequence[int],
        make_groups: Callable[[], object] = lambda: None,
    ) -> None:
        self._make_groups = make_groups
        self._make, self._config, self._loop, self._backend, self._run_dir = make, config, loop, backend, run_dir
        self._flags, self._sizes = flags, tuple(sizes)
        self._began_s = time.monotonic()
        self._binding: BindingInterface | None = None
        self._session: Session | None = None
        self._rejoined: Rejoined | ResizedSession | None = None
        self._resizing = Resizing()
        self._lock: FolderLock | None = None
        self._has_begun = False
        self._resumed_in = -1

    @property
    @override
    def watching(self) -> GuardSettings:
        hang_s = LEASES_TO_HANG * self._config.timeouts.lease_s
        return GuardSettings(hang_s, faults=self._config.drill.faults, devices=visible_devices())

    @property
    @override
    def grid(self) -> Grid | None:
        elastic = self._config.elastic
        return Grid(sizes=self._sizes, join_wait_s=elastic.join_wait_s) if elastic.is_elastic else None

    @override
    def take_rank(self, rank: int, world: int, device: int | None) -> None:
        if device is not None:
            os.environ["LOCAL_RANK"] = str(device)
            if torch.cuda.is_available():
                torch.cuda.set_device(device)

    @override
    def enter(self, store: Any) -> Any:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(self._backend, store=store, timeout=TIMEOUT, rank=rank, world_size=world)
        now = generation()
        if now is not None:
            make_communicators()
        self._make_groups()
        if now is None or now.roster.generation == 0 or not self._take_up():
            self._begin()
        session = self._session
        assert session is not None
        if self._rejoined is not None:
            self._rejoined.resume()
            self._rejoined = None
        else:
            session.begin_training()
        self._has_begun = True
        self._resumed_in = now.roster.generation if now is not None else -1
        Lines(session.binding, session.saving.began_at).write(session.binding.iteration)
        try:
            result = self._loop(session)
        except SystemExit as exit_:
            if exit_.code in (0, None):  # a planned exit, which all ranks reach
                self._finish(session)
            raise
        self._finish(session)
        if now is None:
            dist.destroy_process_group()
        return result

    def _begin(self) -> None:
        """Start the job from a window on disk, or from its beginning. Every rank calls it."""
        names = agree_on_names()
        if not names.is_restart:
            check_stores(self._config.disk)
        binding = self.build(names, ())
        if self._config.elastic.is_elastic:
            if "world_size" not in binding.settings():
                raise ConfigError(
                    f"{SWITCH}: settings() of the binding has no world_size, by which the job tells windows of another "
                    "size; return it, or leave the flag out"
                )
            binding.recut()  # refuses a trainer whose state cannot be divided, before anything else is made
        loaded = load_window(binding, self._config, names, is_resumed=False)
        self.begin_record(binding)
        if names.is_restart:
            self._report_restart(binding, f"the window {loaded.place}" if loaded is not None else "its beginning")
        prepared = loaded.prepared if loaded is not None else None
        self._session = build_session(binding, self._config, names, prepared)
        if self._config.elastic.is_elastic:
            self._resizing.formed(binding, names.number)

    def _report_restart(self, binding: BindingInterface, source: str) -> None:
        text = f"the job restarts at iteration {binding.iteration}, from {source}"
        if dist.get_rank() == 0:
            log.info(text)
        if binding.record is not None:
            binding.record.event(Restarted(binding.iteration, text))

    def _take_up(self) -> bool:
        """Prepare the recovery after a failure. Return False if the job has to restart. Every rank calls it."""
        try:
            if self._config.elastic.is_elastic:
                self._resize()
            else:
                self._rejoin()
        except NothingToResume as why:
            if dist.get_rank() == 0:
                log.warning(f"every rank restarts, because {why}")
            self._resizing.forget()
            self._forget()
            return False
        except Unrecoverable:  # in the next generation no rank has state, so the job restarts
            self._has_begun = False
            raise
        return True

    def _resize(self) -> None:
        # No variable here refers to the old session, because it would keep the old model.
        resized = resize(self._resizing, self._session if self._has_begun else None, self._config, self)
        self._session, self._rejoined = resized.session, resized

    def _rejoin(self) -> None:
        if self._binding is None:
            self._binding = self._make()
            regroup(self._binding)
        session, before = self._session if self._has_begun else None, self._rejoined
        assert not isinstance(before, ResizedSession)
        self._rejoined = take_up(
            binding=self._binding, config=self._config, session=session, before=before, joined=self._joined
        )

    def _joined(self, session: Session, until: int) -> None:
        self._session, binding = session, session.binding
        if self._run_dir is not None and binding.record is None and dist.get_rank() == dist.get_world_size() - 1:
            binding.record = continue_record(self._run_dir, job_name() or "", until)

    def _finish(self, session: Session) -> None:
        """Write the summary after the end of the loop. Every rank calls it."""
        checkpointing, digests, record = session.finish(), state_digest(session.saving.parts), session.binding.record
        if record is None:
            return
        record.event(Ended(session.binding.iteration))
        record.write_summary(
            {
                "iterations": session.binding.iteration,
                "wall_s": time.monotonic() - self._began_s,
                "world_size": dist.get_world_size(),
                "checkpointing": checkpointing,
                "state_digest": digests,
            }
        )
        if record.lock is not None:
            record.lock.release()

    @override
    def drop(self) -> None:
        if self._session is not None:
            self._session.end_threads()
        self._forget()

    @override
    def build(self, names: JobNames, offers: Sequence[Offer]) -> BindingInterface:
        self._binding = binding = self._make()
        regroup(binding)
        self._lock = lock_run_directory(self._run_dir, names.name) if self._run_dir is not None else None
        return binding

    @override
    def has_state(self) -> None:
        self._has_begun = True
        self._resizing.forget()

    @override
    def begin_record(self, binding: BindingInterface) -> None:
        if self._run_dir is not None:
            binding.record = begin_record(self._run_dir, self._lock, self._flags, binding.iteration)

    def _forget(self) -> None:
        self._binding, self._session, self._rejoined, self._has_begun = None, None, None, False

    @override
    def interrupted(self) -> None:
        if self._session is not None:
            self._session.disconnect()
            self._session.interrupted()
        if not self._has_begun:  # this rank has no state to keep
            self._forget()

    @property
    @override
    def has_begun(self) -> bool:
        return self._has_begun

    @property
    @override
    def iteration(self) -> int:
        return self._binding.iteration if self._binding is not None else 0

    @property
    @override
    def resumed_in(self) -> int:
        return self._resumed_in
