"""Modes of an optimizer step: training, replay, redo, following. A mode supplies the results of the step's reductions.

In **training**, Megatron executes the reductions.

A **replay** repeats the original update for active operators alone. Frozen operators have no gradient, so Adam skips
them; a zero gradient would still move their weights by momentum and weight decay. Two results of the original step come
from its record, because they depended on the gradients of all operators: whether gradients overflowed, and the norms by
which they were clipped.

A **redo** repeats the update from logged gradients.

A survivor **follows** a step if it had finished every reduction of the step before the failure, and other ranks have
executed the update. It then executes the update with the reduction results of these ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, override

from megatron.moevement.optimizer.norms import as_clipped_by
from megatron.moevement.optimizer.outcome import Outcome
from megatron.moevement.optimizer.views import Trained
from megatron.moevement.state_digest import members

_DECOUPLED = "decoupled_grad"
"""Attribute in which ``--use-precision-aware-optimizer`` keeps a gradient whose dtype is not that of the weights."""


class Train:
    """Mode of training, in which Megatron executes the reductions.

    Args:
        optimizer: Megatron's ``ChainedOptimizer``.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def prepare_grads(self, original: Callable[[], bool]) -> bool:
        """Return True if gradients overflowed."""
        return original()

    def get_grad_norm(self, original: Callable[[], Any]) -> Any:
        """Return the norm of all gradients."""
        return original()

    def _compute_grad_norms_by_group(self, original: Callable[[], Any]) -> Any:
        """Return the norms of groups of parameters."""
        return original()

    def num_tokens(self, original: Callable[[], int | None]) -> int | None:
        """Return the number of tokens by which gradients were divided; None without per-token loss."""
        return original()

    def count_zeros(self, original: Callable[[], int]) -> int:
        """Return the number of zeros in all gradients; called only if the job logs the number."""
        return original()

    def verdict(self, original: Callable[[], bool], number: int) -> bool:
        """Unscale the gradients of chained optimizer ``number``, and return True if they overflowed."""
        return original()

    def update(self, original: Callable[[], bool]) -> bool:
        """Update all chained optimizers, after gradients are clipped; return True on success."""
        return original()

    def _norms_by_group(self, outcome: Outcome) -> Any:
        norms = outcome["clip_norms_by_group"]
        self._optimizer.grad_norms_by_group = {name: as_clipped_by(norm) for name, norm in norms.items()}
        return self._optimizer.grad_norms_by_group


class Follow(Train):
    """Mode of a rank that had finished all reductions of a step, and uses the results of another rank.

    Args:
        optimizer: Megatron's ``ChainedOptimizer``.
        outcome: outcome of the step on a rank of the same model replica.
    """

    def __init__(self, optimizer: Any, outcome: Outcome) -> None:
        super().__init__(optimizer)
        self._outcome = outcome

    @override
    def prepare_grads(self, original: Callable[[], bool]) -> bool:
        for member, found_inf in zip(members(self._optimizer), self._outcome["found_inf"], strict=True):
            if found_inf is not None:
                member.found_inf.fill_(float(found_inf))
        return bool(self._outcome["overflow"])

    @override
    def get_grad_norm(self, original: Callable[[], Any]) -> Any:
        return as_clipped_by(self._outcome["clip_norm"])

    def _compute_grad_norms_by_group(self, original: Callable[[], Any]) -> Any:
        return self._norms_by_group(self._outcome)

    @override
    def num_tokens(self, original: Callable[[], int | None]) -> int | None:
        return self._outcome.get("num_tokens")

    @override
    def count_zeros(self, original: Callable[[], int]) -> int:
        return int(self._outcome.get("zeros") or 0)  # Records of an older version lack this number.


class Replay(Train):
    """Mode of a replay, which updates active operators as in the original iteration.

    Args:
        optimizer: Megatron's ``ChainedOptimizer``.
        trained: parameters of each operator, by its name.
    """

    def __init__(self, optimizer: Any, trained: Mapping[str, Sequence[Trained]]) -> None:
        super().__init__(optimizer)
        self._trained = trained
        self.frozen: frozenset[str] = frozenset()
        """Operators that are not updated."""
        self.outcome: Outcome | None = None
        """Outcome of the original step; None if Megatron executes the reductions in the replay."""

    @override
    def prepare_grads(self, original: Callable[[], bool]) -> bool:
        overflow = bool(original())
        for name in self.frozen:
            for trained in self._trained.get(name, ()):
                if trained.master is not None:
                    trained.master.grad = None
                    if hasattr(trained.master, _DECOUPLED):
                        setattr(trained.master, _DECOUPLED, None)
                trained.parameter.grad = None
        # The replay computes no gradient of a frozen operator, so it misses an overflow there.
        return overflow if self.outcome is None else bool(self.outcome["overflow"])

    @override
    def get_grad_norm(self, original: Callable[[], Any]) -> Any:
        return original() if self.outcome is None else as_clipped_by(self.outcome["clip_norm"])

    def _compute_grad_norms_by_group(self, original: Callable[[], Any]) -> Any:
        return original() if self.outcome is None else self._norms_by_group(self.outcome)

    @override
    def num_tokens(self, original: Callable[[], int | None]) -> int | None:
        return original() if self.outcome is None else self.outcome.get("num_tokens")

    @override
    def verdict(self, original: Callable[[], bool], number: int) -> bool:
        overflow = original()  # The call unscales gradients; the overflow may have occurred on another rank.
        return overflow if self.outcome is None else bool(self.outcome["found_inf"][number])


class RedoUpdates(Replay):
    """Mode of a redo, which repeats the update of active operators from logged gradients, without reductions.

    Megatron unscales and clips FP32 gradients in their buffers, so a rank logs the clipped gradients. Of narrower
    gradients, Megatron unscales and clips a copy, so a rank logs them as the reduction left them. Therefore this mode
    calls ``put`` twice: for narrow gradients before Megatron unscales and clips, and for FP32 gradients afterwards. The
    second call has no effect on narrow gradients, because Megatron has already copied them.

    Args:
        optimizer: Megatron's ``ChainedOptimizer``.
        trained: parameters of each operator, by its name.
        put: function that copies logged gradients into their buffers.
    """

    def __init__(self, optimizer: Any, trained: Mapping[str, Sequence[Trained]], put: Callable[[], None]) -> None:
        super().__init__(optimizer, trained)
        self._put = put

    @override
    def prepare_grads(self, original: Callable[[], bool]) -> bool:
        self._put()
        return super().prepare_grads(original)

    @override
    def update(self, original: Callable[[], bool]) -> bool:
        self._put()
        return original()
