"""Dense checkpoints of FP32 master weights, if a rank may hold two replicas of an expert.

A checkpoint stores each tensor of a rank once, so it omits the second replica
(:mod:`megatron.moevement.transformer.elastic_moe`). Megatron stores the master weights of a rank as a list, and an
omitted entry would shift all later entries. This module stores them as a dictionary by position in the list, so that
an omitted entry leaves a gap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.moevement.elastic.slots import slots

_MASTERS = "fp32_from_fp16_params"


def save_masters_by_number(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Store FP32 master weights by parameter group and position in the group, in place of ``sharded_state_dict``."""
    state = original(self, *args, **kwargs)
    if slots() is None or _MASTERS not in state:
        return state
    return {**state, _MASTERS: {group: dict(enumerate(masters)) for group, masters in enumerate(state[_MASTERS])}}


def load_masters_in_lists(original: Callable[..., Any], self: Any, state_dict: Any) -> Any:
    """Accept the dictionaries of :func:`save_masters_by_number`, in place of ``load_state_dict``."""
    masters = state_dict.get(_MASTERS)
    if isinstance(masters, dict):
        ordered = [[numbered[number] for number in sorted(numbered)] for _, numbered in sorted(masters.items())]
        state_dict = {**state_dict, _MASTERS: ordered}
    return original(self, state_dict)
