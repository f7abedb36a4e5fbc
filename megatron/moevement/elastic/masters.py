"""Dense checkpoints of FP32 masters where a rank has two replicas of an expert.

A checkpoint takes each tensor from a rank once, so the second replica is left out of it and stays as it is
(:mod:`megatron.moevement.transformer.elastic_moe`). Megatron keeps masters in lists, in which what is left out moves
those after it. By their number they stay where they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron.moevement.elastic.slots import slots

_MASTERS = "fp32_from_fp16_params"


def masters_by_number(original: Callable[..., Any]) -> Callable[..., Any]:
    """``sharded_state_dict`` of an optimizer that may have FP32 masters, with these by group and number."""

    @functools.wraps(original)
    def sharded_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = original(self, *args, **kwargs)
        if slots() is None or _MASTERS not in state:
            return state
        return {**state, _MASTERS: {group: dict(enumerate(its)) for group, its in enumerate(state[_MASTERS])}}

    return sharded_state_dict


def masters_in_lists(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``load_state_dict``, which gets the result of :func:`masters_by_number`."""

    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> Any:
        masters = state_dict.get(_MASTERS)
        if isinstance(masters, dict):
            ordered = [[its[number] for number in sorted(its)] for _, its in sorted(masters.items())]
            state_dict = {**state_dict, _MASTERS: ordered}
        return original(self, state_dict)

    return load_state_dict
