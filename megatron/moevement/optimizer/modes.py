"""Modes that answer the reductions of Megatron's chained step: by reducing, in training; from records, otherwise.

In a **replay** the update is the one that was made the first time, for active operators alone. Frozen operators have
no gradient (not a zero one, with which momentum and weight decay would still move the weights), so Adam passes them
over. What the first time was worked out from all gradients is taken from the record: whether there was an overflow,
and the norms that gradients were clipped by.

In a **redo** gradients are logged ones.

A rank that **follows** had finished every reduction of a step that others have made; it takes what came of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, override

from megatron.moevement.optimizer.norms import as_clipped_by
from megatron.moevement.optimizer.outcome import Outcome
from megatron.moevement.optimizer.views import Trained
from megatron.moevement.state_digest import members

_DECOUPLED = "decoupled_grad"
"""Attribute with gradients whose dtype differs from that of what is stepped (``--use-precision-aware-optimizer``)."""


class Train:
    """Reductions are Megatron's own.

    Args:
        optimizer: Megatron's ``ChainedOptimizer``.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def prepare_grads(self, original: Callable[[], bool]) -> bool:
        """Return whether gradients overflowed."""
        return original()

    def get_grad_norm(self, original: Callable[[], Any]) -> Any:
        """The norm of all gradients."""
        return original()

    def _compute_grad_norms_by_group(self, original: Callable[[], Any]) -> Any:
        """The norms of groups of parameters."""
        return original()

    def num_tokens(self, original: Callable[[], int | None]) -> int | None:
        """Return the number by which gradients were divided."""
        return original()

    def count_zeros(self, original: Callable[[], int]) -> int:
        """Elements of all gradients that are zero; asked for where the job logs them."""
        return original()

    def verdict(self, original: Callable[[], bool], number: int) -> bool:
        """Return whether gradients of the chained optimizer ``number`` overflowed, after they were unscaled."""
        return original()

    def update(self, original: Callable[[], bool]) -> bool:
        """The update of all chained optimizers, when gradients are clipped."""
        return original()

    def _norms_by_group(self, outcome: Outcome) -> Any:
        norms = outcome["clip_norms_by_group"]
        self._optimizer.grad_norms_by_group = {name: as_clipped_by(norm) for name, norm in norms.items()}
        return self._optimizer.grad_norms_by_group


class Follow(Train):
    """Reductions were finished; the rank that follows has their results from another one.

    Args:
        optimizer: Megatron's ``ChainedOptimizer``.
        outcome: of the step, on a rank of the same model replica.
    """

    def __init__(self, optimizer: Any, outcome: Outcome) -> None:
        super().__init__(optimizer)
        self._outcome = outcome

    @override
    def prepare_grads(self, original: Callable[[], bool]) -> bool:
        for member, found in zip(members(self._optimizer), self._outcome["found_inf"], strict=True):
            if found is not None:
                member.found_inf.fill_(float(found))
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
        return int(self._outcome.get("zeros") or 0)  # of a record that an older version wrote it is not known


class Replay(Train):
    """Active operators are updated as they were the first time.

    Args:
        optimizer: Megatron's ``ChainedOptimizer``.
        trained: the parameters of each operator, by its name.
    """

    def __init__(self, optimizer: Any, trained: Mapping[str, Sequence[Trained]]) -> None:
        super().__init__(optimizer)
        self._trained = trained
        self.frozen: frozenset[str] = frozenset()
        """Operators that are passed over."""
        self.outcome: Outcome | None = None
        """Outcome of the first execution; None: it is computed again."""

    @override
    def prepare_grads(self, original: Callable[[], bool]) -> bool:
        found = bool(original())
        for name in self.frozen:
            for trained in self._trained.get(name, ()):
                if trained.master is not None:
                    trained.master.grad = None
                    if hasattr(trained.master, _DECOUPLED):
                        setattr(trained.master, _DECOUPLED, None)
                trained.parameter.grad = None
        # An overflow in the gradient of a frozen operator is not seen again.
        return found if self.outcome is None else bool(self.outcome["overflow"])

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
        found = original()  # it unscales; the overflow may have been seen elsewhere only
        return found if self.outcome is None else bool(self.outcome["found_inf"][number])


class Redo(Replay):
    """The update is made again from logged gradients, for operators that are active; nothing is reduced.

    A gradient that was reduced in FP32 was unscaled and clipped where it stood, and logged after that; a narrower one
    was logged as it was reduced. So all are put in place before Megatron unscales and clips, for the narrow ones, and
    again after it, for the others. Narrow ones are not read then: the optimizer has its own copy of them.

    Args:
        optimizer: Megatron's ``ChainedOptimizer``.
        trained: the parameters of each operator, by its name.
        put: puts logged gradients into their buffers.
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
