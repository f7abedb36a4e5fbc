"""Evaluation leaves every random generator as it found it.

An evaluation may draw: routers add their jitter to its inputs, too. It comes between two iterations, so a rank that
dies after it and is replayed from snapshots, which know nothing of evaluations, would go on from the generators of
before it.
Here the iterations after an evaluation draw what they would have drawn without it, in every run, with and without
sparse checkpointing: losses do not depend on how often a job is evaluated. In stock Megatron they do, where it draws.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron.moevement.runtime.boundary import put_random_states
from megatron.moevement.state_digest import random_states


def leaving_generators(original: Callable[..., Any]) -> Callable[..., Any]:
    """``evaluate_and_print_results`` that puts Python's, NumPy's, torch's, the device's and the tracker's states back.

    An evaluation that is interrupted puts nothing back: the boundary record does, on the way to the next one.
    """

    @functools.wraps(original)
    def evaluate_and_print_results(*args: Any, **kwargs: Any) -> Any:
        before = random_states()
        result = original(*args, **kwargs)
        put_random_states(before)
        return result

    return evaluate_and_print_results
