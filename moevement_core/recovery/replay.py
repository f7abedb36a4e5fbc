"""Replay from snapshots to a dense state: the state machine of MoEvement's figure 8 (section 3.3), and redo.

The first snapshot is ``SS_a``. It holds full state of some operators, and compute weights of the other operators. The
replay loads it, and executes iteration a+1 with the other operators frozen. Then the replay loads the next snapshot,
and so on. After the last snapshot of the recoverable run, every operator is active and the state is dense. From there,
the replay executes iterations as usual, up to the last committed iteration.

If snapshots hold gradients, no iteration is executed before the state is dense. Instead, the replay repeats the updates
of the operators whose full state is loaded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from moevement_core.policy.schedule import Saved
from moevement_core.recovery.check import StateCheck
from moevement_core.recovery.plan import RecoveryPlan
from moevement_core.snapshot.snapshot import Snapshot

BOUNDARY, ITERATION = "boundary", "iteration"
"""Keys of a snapshot's record: the boundary state, and the outcome of the iteration before the boundary."""


class Trainer(ABC):
    """Interface of the training that a replay drives on one rank; all ranks that replay make the same calls."""

    @abstractmethod
    def load(self, snapshot: Snapshot, loads: Mapping[str, Saved], *, is_shared: bool = True) -> None:
        """Load full state or compute weights of some operators from ``snapshot`` into the live tensors.

        Args:
            snapshot: snapshot of this rank.
            loads: kind of state to load, by operator.
            is_shared: True if data-parallel replicas each saved a part of the state, and exchange the parts now; all
                of them must make this call. False to load without waiting for other ranks; the replay then calls
                :meth:`gather_replicas`, which exchanges the parts later.
        """

    def redo(self, iteration: int, gradients: Mapping[str, Sequence[tuple[str, torch.Tensor]]], outcome: Any) -> None:
        """Repeat the update of ``iteration`` for some operators, without waiting for other ranks.

        The replay calls this only if the binding provides gradients (``OperatorState.gradient``).

        Args:
            iteration: iteration of the update; the boundary state before the iteration is already set.
            gradients: keys and values of the gradients of the update, by operator; flat, on the host. Other operators
                stay unchanged.
            outcome: record of the first execution.
        """
        raise NotImplementedError

    def gather_replicas(self) -> None:
        """Exchange state among ranks after each has repeated its updates; see ``Binding.gather_replicas``."""
        raise NotImplementedError

    def before_load(self, boundary: Any) -> None:
        """Prepare for the next :meth:`load`; ``boundary`` is the boundary state that is set after that load."""

    @abstractmethod
    def put_boundary(self, boundary: Any) -> None:
        """Set all state between two iterations: random states, router buffers, loss scalers, ..."""

    @abstractmethod
    def freeze(self, iteration: int, frozen: frozenset[str]) -> None:
        """Freeze the ``frozen`` operators of the stage, and activate all others, before ``iteration`` is executed."""

    @abstractmethod
    def run(self, iteration: int, outcome: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Execute ``iteration`` again and return its losses.

        Args:
            iteration: iteration to execute.
            outcome: record of the first execution: the norm that clipped the gradients, and whether the update was
                skipped. None if there is no record. The trainer then computes the norm, and decides on the update, from
                the gradients of all operators, so the replay freezes no operator in this iteration. For an iteration
                that the user told the job to skip, there is no record either, and no norm is needed.

        Returns:
            Losses by name; empty if this rank has none.
        """

    def record(self) -> Mapping[str, Any]:
        """Return a new record of the last executed step: the key ``step``, and the trainer's own keys.

        The replay uses this record only if no record of the step's first execution exists.
        """
        return {}

    @property
    def gradients_stay(self) -> bool:
        """True if the gradients of the last iteration are still in memory when :meth:`run` or :meth:`load` returns."""
        return True

    def sent(self, iteration: int) -> str | None:
        """Return a digest of the tensors that the last executed iteration sent to other stages; None if unknown.

        A replaying rank sends nothing to stages that do not replay. The digest includes the tensors that these stages
        got in the first execution.
        """
        return None


class ReplayObserver:
    """Base class of observers of a replay's progress; its methods do nothing."""

    def runs(self, iteration: int, frozen: int) -> None:
        """Note that ``iteration`` is executed next, with ``frozen`` operators frozen."""

    def redoes(self, iteration: int) -> None:
        """Note that the update of ``iteration`` is repeated next."""

    def is_dense(self, iteration: int, record: Mapping[str, Any]) -> None:
        """Note that the dense state of ``iteration`` is live; not called for the last iteration of the plan.

        Args:
            iteration: iteration of the state.
            record: outcome of the iteration, from its snapshot or from the replay.
        """


def replay(
    plan: RecoveryPlan,
    stage: int,
    names: Sequence[str],
    snapshots: Mapping[int, Snapshot],
    trainer: Trainer,
    check: StateCheck,
    observer: ReplayObserver,
    outcomes: Mapping[int, Any] | None = None,
) -> Mapping[str, Any]:
    """Turn ``snapshots`` into the dense state of iteration ``plan.until``; ``check`` collects the differences.

    Args:
        plan: iterations to load, to redo and to execute.
        stage: stage of this rank.
        names: operators of the stage's table.
        snapshots: snapshots of this rank, by iteration: all up to the dense state, and some later ones.
        trainer: training on this rank.
        check: compares the result with the lost state.
        observer: receives the progress of the replay.
        outcomes: records of iterations for which this rank has no snapshot, from other ranks that keep the records.

    Returns:
        Record of the last executed iteration; empty if none was executed.
    """
    run = plan.runs[stage]
    step_outcome: Mapping[str, Any] = {}
    updated: frozenset[str] = frozenset()
    for iteration in range(plan.first, plan.until + 1):
        snapshot = snapshots.get(iteration)
        if snapshot is not None:
            trainer.before_load(snapshot.record()[BOUNDARY])
        if iteration <= run.last and (snapshot is not None or not run.is_stale):
            trainer.load(snapshots[iteration], _by_name(names, run.loads(iteration)), is_shared=not run.is_redone)
        if run.is_redone and iteration == run.last:
            trainer.gather_replicas()
        if snapshot is not None:
            active = run.is_at(iteration)
            check.compare(snapshot, frozenset(_chosen(names, active)), updated)
            trainer.put_boundary(snapshot.record()[BOUNDARY])
        if iteration == plan.until:
            break
        if iteration >= run.last:
            observer.is_dense(iteration, step_outcome if snapshot is None else snapshot.record()[ITERATION])
        if iteration < plan.begins:
            continue  # The first snapshots already hold this state, so there is nothing to execute or redo.
        following = snapshots.get(iteration + 1)
        if iteration + 1 in plan.redone:
            redone = frozenset(_chosen(names, run.active_in(iteration + 1)))
            if not redone:
                continue  # Only other stages have operators to redo here, because their newest full state is older.
            assert following is not None, "a run of snapshots has no gap where gradients are used"
            observer.redoes(iteration + 1)
            if outcome := following.record()[ITERATION] or None:
                trainer.redo(iteration + 1, _gradients(following, redone), outcome)
                updated |= redone
            continue
        frozen = frozenset(_chosen(names, ~run.active_in(iteration + 1)))
        trainer.freeze(iteration + 1, frozen)
        observer.runs(iteration + 1, len(frozen))
        outcome = following.record()[ITERATION] if following is not None else (outcomes or {}).get(iteration + 1)
        outcome = outcome or None
        is_left_out = following is not None and outcome is None
        if not is_left_out and not (outcome or {}).get("skipped"):  # After an overflow, the update is skipped.
            updated |= frozenset(_chosen(names, run.active_in(iteration + 1)))
        losses = trainer.run(iteration + 1, outcome)
        check.compare_losses(iteration + 1, losses, outcome)
        sent = trainer.sent(iteration + 1)
        check.compare_sent(iteration + 1, sent, outcome)
        step_outcome = {
            "iteration": iteration + 1, "losses": losses, "sent": sent, **trainer.record(), **(outcome or {}),
        }  # fmt: skip
    return step_outcome


def _gradients(snapshot: Snapshot, active: frozenset[str]) -> dict[str, list[tuple[str, torch.Tensor]]]:
    """Return the gradients of ``active`` operators, by operator.

    An operator with full state in the snapshot has no gradients there.
    """
    gradients: dict[str, list[tuple[str, torch.Tensor]]] = {}
    for entry, tensor in snapshot.tensors_of(dict.fromkeys(active, Saved.GRADIENT)):
        gradients.setdefault(entry.operator, []).append((entry.key, tensor))
    return gradients


def _by_name(names: Sequence[str], loads: np.ndarray) -> dict[str, Saved]:
    return {name: Saved(saved) for name, saved in zip(names, loads.tolist(), strict=True) if saved != Saved.NOTHING}


def _chosen(names: Sequence[str], mask: np.ndarray) -> list[str]:
    return [name for name, chosen in zip(names, mask.tolist(), strict=True) if chosen]
