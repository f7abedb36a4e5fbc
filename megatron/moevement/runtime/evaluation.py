"""Evaluation leaves every random generator as it found it, and ends early where the job is asked to end.

An evaluation may draw: routers add their jitter to its inputs, too. It comes between two iterations, so a rank that
dies after it and is replayed from snapshots, which know nothing of evaluations, would go on from the generators of
before it.
Here the iterations after an evaluation draw what they would have drawn without it, in every run, with and without
sparse checkpointing: losses do not depend on how often a job is evaluated. In stock Megatron they do, where it draws.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from megatron.moevement.runtime.boundary import put_random_states
from megatron.moevement.runtime.job import Process
from megatron.moevement.state_digest import random_states
from moevement_core.rendezvous.status_page import own_page
from moevement_core.session.wind_down import is_asked_for

_NEVER, _AT_ONCE = 1e12, 1e-12
"""Minutes, for ``--exit-duration-in-mins``."""


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


def ending_when_asked(process: Process) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Wrap ``evaluate``: a job that is asked to end leaves an evaluation within an iteration of it.

    Megatron asks all ranks after each iteration of an evaluation whether ``--exit-duration-in-mins`` is over on any of
    them, if the flag is given. Here it always does, and on a rank that was asked to end the duration is over. What
    Megatron leaves undone where it returns early, because it ends then, is done here: training goes on for the one or
    two iterations that ranks take to agree on the boundary at which they end.
    """

    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def evaluate(forward_step_func: Any, data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            from megatron.training import get_args, get_timers

            settings, job = get_args(), process.job
            if job.session is None or own_page() is None:
                return original(forward_step_func, data_iterator, model, *args, **kwargs)

            consumed = {settings.consumed_valid_samples}

            @functools.wraps(forward_step_func)
            def forward_step(*words: Any, **more: Any) -> Any:
                consumed.add(settings.consumed_valid_samples)
                if is_asked_for():
                    settings.exit_duration_in_mins = _AT_ONCE
                return forward_step_func(*words, **more)

            with job.live.undo.nested() as undo:
                undo.set(settings, "exit_duration_in_mins", settings.exit_duration_in_mins or _NEVER)
                result = original(forward_step, data_iterator, model, *args, **kwargs)
            if result[2]:
                for chunk in model:
                    chunk.train()
                get_timers()("evaluate").stop()
                # The job that goes on evaluates next with the samples that come after the whole of this evaluation.
                before, after_first, *_ = sorted({*consumed, settings.consumed_valid_samples})
                given = signature.bind(forward_step, data_iterator, model, *args, **kwargs).arguments
                iterations = given.get("eval_iters") or settings.eval_iters
                settings.consumed_valid_samples = before + (after_first - before) * iterations
            return result

        return evaluate

    return wrapper
