"""Evaluation that leaves every random generator unchanged, and ends early if the job is asked to end.

An evaluation may draw random numbers; a router, for example, may add jitter to its inputs. An evaluation runs between
two iterations, and snapshots do not include it. If a rank failed after an evaluation, its replacement would replay and
then continue with the random states from before the evaluation. This module therefore restores the random states after
each evaluation, with and without sparse checkpointing. Training losses then do not depend on the number of evaluations.
In stock Megatron they do, if evaluations draw random numbers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from megatron.moevement.runtime.boundary import put_random_states
from megatron.moevement.runtime.job import Process
from megatron.moevement.state_digest import random_states
from moevement_core.rendezvous.status_page import is_asked_to_end, own_page

_NEVER, _AT_ONCE = 1e12, 1e-12
"""Minutes for ``--exit-duration-in-mins`` with which Megatron never ends an evaluation, or ends it at once."""


def leave_generators(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Restore the random states from before the evaluation, after ``evaluate_and_print_results``.

    These are the states of Python, NumPy, torch, the device and Megatron's tracker. If a failure interrupts the
    evaluation, the function restores nothing, because the recovery restores the random states from the boundary record.
    """
    before = random_states()
    result = original(*args, **kwargs)
    put_random_states(before)
    return result


def end_when_asked(
    process: Process,
    original: Callable[..., Any],
    forward_step_func: Any,
    data_iterator: Any,
    model: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """End ``evaluate`` after its current iteration if the job is asked to end.

    With ``--exit-duration-in-mins``, Megatron checks after each iteration of an evaluation whether the duration is over
    on any rank. The function makes use of this check. If the flag is not set, it sets a duration that is never over. As
    soon as a rank is asked to end, it sets a duration that is already over on this rank. Megatron then returns early
    from ``evaluate`` and skips the end of ``evaluate``, because it expects to exit soon. The function does the skipped
    steps, because the job trains one or two more iterations until ranks have agreed where to end.
    """
    from megatron.training import get_timers

    settings, job = process.args, process.job
    if job.session is None or own_page() is None:
        return original(forward_step_func, data_iterator, model, *args, **kwargs)

    consumed = {settings.consumed_valid_samples}

    @functools.wraps(forward_step_func)
    def forward_step(*words: Any, **more: Any) -> Any:
        consumed.add(settings.consumed_valid_samples)
        if is_asked_to_end():
            settings.exit_duration_in_mins = _AT_ONCE
        return forward_step_func(*words, **more)

    with job.live.undo.nested() as undo:
        undo.set(settings, "exit_duration_in_mins", settings.exit_duration_in_mins or _NEVER)
        result = original(forward_step, data_iterator, model, *args, **kwargs)
    if result[2]:
        for chunk in model:
            chunk.train()
        get_timers()("evaluate").stop()
        # All samples of this evaluation count as consumed, so that a continued job evaluates later samples.
        before, after_first, *_ = sorted({*consumed, settings.consumed_valid_samples})
        arguments = inspect.signature(original).bind(forward_step, data_iterator, model, *args, **kwargs).arguments
        iterations = arguments.get("eval_iters") or settings.eval_iters
        settings.consumed_valid_samples = before + (after_first - before) * iterations
    return result
