"""Interface through which an elastic job divides a trainer's state anew when its number of ranks changes.

A rank's state is a set of *pieces*. A piece is a range of a tensor, with a name that does not depend on the number of
ranks. So ranks of a resized job find the pieces that they need on the ranks that still hold them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from moevement_core.elastic.exchange import Piece
from moevement_core.elastic.layout import RankLayout
from moevement_core.engine.layout import OperatorState
from moevement_core.policy.schedule import Saved
from moevement_core.snapshot.snapshot import StateTensor


class Recut(ABC):
    """Division of one rank's state, and of the records that ranks keep of it. ``Binding.recut`` returns it.

    Unless a method says otherwise, it runs on every rank at the same point, and does not communicate.
    """

    @abstractmethod
    def layout(self) -> RankLayout:
        """Return the position of this rank in the current process groups."""

    @property
    def free_settings(self) -> frozenset[str]:
        """Entries of ``Binding.settings`` that may differ between a window on disk and the job that loads it."""
        return frozenset({"world_size"})

    def is_cut_alike(self, settings: Mapping[str, Any]) -> bool:
        """Return True if ranks of another job divided their state as the ranks of this job do.

        Args:
            settings: result of ``Binding.settings`` in that job.
        """
        return bool(settings.get("world_size") == dist.get_world_size())

    @abstractmethod
    def layout_of(self, settings: Mapping[str, Any], rank: int) -> RankLayout:
        """Return the position of a rank of another job.

        Args:
            settings: result of ``Binding.settings`` in that job, with ``world_size``.
            rank: rank in that job.
        """

    @abstractmethod
    def pieces(self, layout: RankLayout) -> Sequence[Piece]:
        """Return the full state of this rank as views of live tensors. The same range may be on several ranks.

        Args:
            layout: position of this rank when its model was built. The process groups may be newer than the model.
        """

    @abstractmethod
    def saved_piece(self, saved: StateTensor, layout: RankLayout) -> Piece:
        """Return a tensor of a snapshot as a piece, flat, with the same memory.

        Full state has the names that :meth:`pieces` gives. Compute weights and gradients have other names.

        Args:
            saved: tensor with its operator, kind of state, and key.
            layout: position of the rank that saved it.
        """

    def filled(self) -> None:  # noqa: B027
        """Update what depends on :meth:`pieces`, such as compute weights, after these were written. Collective."""

    def fitted_boundary(self, boundary: Mapping[str, Any], source: RankLayout) -> Mapping[str, Any]:
        """Convert a boundary record of another rank of this stage to one that this rank can restore.

        Args:
            boundary: record of the other rank.
            source: position of the other rank when it made the record.
        """
        return boundary

    def fitted_step(self, record: Mapping[str, Any], *, is_comparable: bool) -> Mapping[str, Any]:
        """Convert another rank's record of an iteration's step to one that this rank can use.

        Args:
            record: record of the other rank; empty if that rank made none.
            is_comparable: True to keep the recorded losses; False if the recovery may not restore the lost state bit
                for bit, so that these losses would not belong to the restored state.
        """
        return {name: value for name, value in record.items() if is_comparable or name != "losses"}

    def offer(self, layout: RankLayout) -> Any:
        """Return plain data that every rank of the resized job should know before it builds its model.

        Survivors call it before they drop their model.

        Args:
            layout: position that this rank had until now.
        """
        return None

    def results(self, iteration: int) -> Any:
        """Return this rank's part of the results of ``iteration``, as plain data; None if it has none.

        Survivors call it before they drop their model. The results may not be in the metrics yet.
        """
        return None

    def put_results(self, iteration: int, parts: Mapping[RankLayout, Any], outcome: Mapping[str, Any]) -> None:  # noqa: B027
        """Write the metrics of ``iteration``, the resume iteration, if they are missing.

        Args:
            iteration: newest committed iteration, whose state this rank has now.
            parts: results of :meth:`results` on all survivors that had committed ``iteration``.
            outcome: outcome of the iteration's step.
        """


class WholeTensors(Recut):
    """Division of the state of a trainer whose ranks hold whole tensors.

    An operator's state is on one rank, or equal on several ranks. Names of operators and keys of tensors do not depend
    on the number of ranks.

    Args:
        states: function that returns the live tensors of this rank (``Binding.states``).
        stage: function that returns the pipeline stage of this rank in the current process groups.
        losses: losses of recent iterations on this rank (``Binding.losses``).
    """

    def __init__(
        self,
        states: Callable[[], Mapping[str, OperatorState]],
        stage: Callable[[], int],
        losses: MutableMapping[int, Mapping[str, Any]],
    ) -> None:
        self._states, self._stage, self._losses = states, stage, losses

    def layout(self) -> RankLayout:
        """Return the position of this rank. Each rank has a shard of its own, because random states may differ."""
        rank = dist.get_rank()
        return RankLayout(rank, dist.get_world_size(), self._stage(), shard=(rank,))

    def layout_of(self, settings: Mapping[str, Any], rank: int) -> RankLayout:
        """Return the position of a rank of another job without a pipeline."""
        return RankLayout(rank, settings["world_size"], stage=0, shard=(rank,))

    def pieces(self, layout: RankLayout) -> list[Piece]:
        """Return the full state of all operators."""
        return [self.saved_piece(tensor, layout) for state in self._states().values() for tensor in state.full]

    def saved_piece(self, saved: StateTensor, layout: RankLayout) -> Piece:
        """Return a tensor as a piece that begins at its first element."""
        kind = "" if saved.saved is Saved.FULL else f"{saved.saved.name.lower()}."
        return Piece(saved.operator, f"{saved.operator}/{kind}{saved.key}", 0, saved.tensor.detach().view(-1))

    def results(self, iteration: int) -> Any:
        """Return the losses of ``iteration`` on this rank, by name."""
        return {name: torch.as_tensor(loss).cpu() for name, loss in self._losses.get(iteration, {}).items()}

    def put_results(self, iteration: int, parts: Mapping[RankLayout, Any], outcome: Mapping[str, Any]) -> None:
        """Take the losses of the last rank that still lives; the last rank of a job writes its own losses."""
        if parts:
            self._losses[iteration] = parts[max(parts, key=lambda layout: layout.rank)]
