"""Loading of a dense checkpoint's optimizer state by a job with more or less expert parallelism than its writer.

With expert parallelism, Megatron chains two optimizers: for dense weights and for experts. A checkpoint then has a
common part (options of the parameter groups, loss scaler) for each optimizer, under the optimizer's number. Without
expert parallelism, it has a single common part and no number. Tensors are stored by parameter name and fit in both
cases, so this module converts only common parts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

_TENSORS = "param_state"


def load_across_expert_parallelism(original: Callable[..., Any], self: Any, state_dict: Any) -> Any:
    """Load state that another number of optimizers saved, in place of ``ChainedOptimizer.load_state_dict``."""
    if isinstance(state_dict, dict):
        if len(self.chained_optimizers) == 1 and "optimizer" not in state_dict and 0 in state_dict:
            state_dict = _into_one(state_dict)
        elif len(self.chained_optimizers) > 1 and "optimizer" in state_dict:
            state_dict = _into_several(state_dict, len(self.chained_optimizers))
    return original(self, state_dict)


def _into_one(state_dict: dict[Any, Any]) -> dict[Any, Any]:
    members = [state_dict[index] for index in sorted(key for key in state_dict if isinstance(key, int))]
    merged = {key: value for key, value in state_dict.items() if not isinstance(key, int)}
    merged = {**members[0], **merged}
    groups = [group for member in members for group in member["optimizer"]["param_groups"]]
    merged["optimizer"] = {**members[0]["optimizer"], "param_groups": groups}
    return merged


def _into_several(state_dict: dict[Any, Any], count: int) -> dict[Any, Any]:
    common = {key: value for key, value in state_dict.items() if not isinstance(key, int) and key != _TENSORS}
    return {index: copy.deepcopy(common) | state_dict.get(index, {}) for index in range(count)}
