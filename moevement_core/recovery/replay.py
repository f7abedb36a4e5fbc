"""From snapshots to a dense state: the state machine that is figure 8 of MoEvement (section 3.3), and redo.

Before iteration a+1 the first slot is loaded: full state of some operators, compute weights of the others. Iteration
a+1 runs with the others frozen, the next slot is loaded, and so on. With the last slot every operator is active and the
state is dense; from there iterations run as they always do, up to the last one that was committed.

Where snapshots have gradients no iteration is run on the way to the dense state: in its place the updates of the
operators whose full state is loaded are made again.
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
"""The two parts of a snapshot's record: what stood between two iterations, and what came of the one before."""


class Trainer(ABC):
    """The training that a replay drives, on one rank; all ranks that replay drive theirs alike."""

    @abstractmethod
    def load(self, snapshot: Snapshot, loads: Mapping[str, Saved], *, is_shared: bool = True) -> None:
        """Bring state from ``snapshot`` into the live tensors: of each operator named, full state or compute weights.

        Args:
            snapshot: of this rank.
            loads: what of which operator.
            is_shared: whether replicas of one state exchange what each of them has saved; all of them load then.
                Otherwise this waits for nobody, and :meth:`complete` does it in the end.
        """

    def redo(self, iteration: int, gradients: Mapping[str, Sequence[tuple[str, torch.Tensor]]], outcome: Any) -> None:
        """Make the update of ``iteration`` again, for some operators; waits for nobody.

        Args:
            iteration: whose boundary before it was put.
            gradients: by operator, keys and values of the gradients that the update was made from; flat, on the host.
                Operators that are not named stay as they are.
            outcome: the record of the first time.

        Only where the binding gives gradients (``OperatorState.gradient``).
        """
        raise NotImplementedError

    def complete(self) -> None:
        """After updates that ranks made again by themselves: see ``Binding.complete``."""
        raise NotImplementedError

    def before_load(self, boundary: Any) -> None:
        """What state that is loaded next has to find: the boundary it belongs to, which is put when it is loaded."""

    @abstractmethod
    def put_boundary(self, boundary: Any) -> None:
        """Set everything that stands between two iterations: random states, router buffers, loss scalers, ..."""

    @abstractmethod
    def freeze(self, iteration: int, frozen: frozenset[str]) -> None:
        """From now on these operators of the stage are frozen and all others active; ``iteration`` comes next."""

    @abstractmethod
    def run(self, iteration: int, outcome: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Run ``iteration`` again.

        Args:
            outcome: the record of the first time: whether the update was skipped, the norm that gradients were clipped
                by. Without it (every operator is active then, or the iteration was left out) it is worked out again.

        Returns:
            The losses, where this rank has them.
        """

    def record(self) -> Mapping[str, Any]:
        """Returns what came of the step of the iteration that was run last, as its record has it: ``step`` and what the
        trainer gives beside it. Only asked for where updates may be lost, and iterations have another outcome.
        """
        return {}

    @property
    def gradients_stay(self) -> bool:
        """Whether the gradients of an iteration are still there when :meth:`run` or :meth:`load` returns."""
        return True

    def sent(self, iteration: int) -> str | None:
        """A digest of what ``iteration``, which was run last, sent to other stages or would have; None: not known."""
        return None


class Observer:
    """Is told how far a replay is; does nothing itself."""

    def runs(self, iteration: int, frozen: int) -> None:
        """``iteration`` is run again next, with so many operators frozen."""

    def redoes(self, iteration: int) -> None:
        """The update of ``iteration`` is made again next."""

    def is_dense(self, iteration: int, record: Mapping[str, Any]) -> None:
        """The dense state of ``iteration``, which is not the last one, is live.

        Args:
            iteration: whose state it is.
            record: what came of it, the first time or now.
        """


def replay(
    plan: RecoveryPlan,
    stage: int,
    names: Sequence[str],
    snapshots: Mapping[int, Snapshot],
    trainer: Trainer,
    check: StateCheck,
    observer: Observer,
    outcomes: Mapping[int, Any] | None = None,
) -> Mapping[str, Any]:
    """Turn ``snapshots`` into the dense state of iteration ``plan.until``; what differs is in ``check``.

    Args:
        plan: which iterations.
        stage: this rank's.
        names: the operators of its table.
        snapshots: this rank's own, by iteration: all of the plan's up to where the state is dense, some beyond.
        trainer: this rank's part of training.
        check: compares what comes out with what was.
        observer: is told how far it is.
        outcomes: records of iterations that no snapshot here has, from ranks that remember them.

    Returns:
        The record of the last iteration that was run; empty if none was.
    """
    run = plan.runs[stage]
    came_of: Mapping[str, Any] = {}
    updated: frozenset[str] = frozenset()
    for iteration in range(plan.first, plan.until + 1):
        snapshot = snapshots.get(iteration)
        if snapshot is not None:
            trainer.before_load(snapshot.record()[BOUNDARY])
        if iteration <= run.last and (snapshot is not None or not run.is_stale):
            trainer.load(snapshots[iteration], _by_name(names, run.loads(iteration)), is_shared=not run.is_redone)
        if run.is_redone and iteration == run.last:
            trainer.complete()
        if snapshot is not None:
            active = run.is_at(iteration)
            check.compare(snapshot, frozenset(_chosen(names, active)), updated)
            trainer.put_boundary(snapshot.record()[BOUNDARY])
        if iteration == plan.until:
            break
        if iteration >= run.last:
            observer.is_dense(iteration, came_of if snapshot is None else snapshot.record()[ITERATION])
        if iteration < plan.begins:
            continue  # snapshots from before the run began: nothing was run from here to the next
        following = snapshots.get(iteration + 1)
        if iteration + 1 in plan.redone:
            redone = frozenset(_chosen(names, run.active_in(iteration + 1)))
            if not redone:
                continue  # other stages have operators whose newest state is older
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
        if not is_left_out and not (outcome or {}).get("skipped"):  # an overflow updates nothing either
            updated |= frozenset(_chosen(names, run.active_in(iteration + 1)))
        losses = trainer.run(iteration + 1, outcome)
        check.compare_losses(iteration + 1, losses, outcome)
        sent = trainer.sent(iteration + 1)
        check.compare_sent(iteration + 1, sent, outcome)
        came_of = {
            "iteration": iteration + 1, "losses": losses, "sent": sent, **trainer.record(), **(outcome or {}),
        }  # fmt: skip
    return came_of


def _gradients(snapshot: Snapshot, active: frozenset[str]) -> dict[str, list[tuple[str, torch.Tensor]]]:
    """By operator, what its update was made from: none of those that the snapshot holds in full."""
    gradients: dict[str, list[tuple[str, torch.Tensor]]] = {}
    for entry, tensor in snapshot.tensors_of(dict.fromkeys(active, Saved.GRADIENT)):
        gradients.setdefault(entry.operator, []).append((entry.key, tensor))
    return gradients


def _by_name(names: Sequence[str], loads: np.ndarray) -> dict[str, Saved]:
    return {name: Saved(saved) for name, saved in zip(names, loads.tolist(), strict=True) if saved != Saved.NOTHING}


def _chosen(names: Sequence[str], mask: np.ndarray) -> list[str]:
    return [name for name, chosen in zip(names, mask.tolist(), strict=True) if chosen]
