"""Saves and exits of Megatron's trainer outside of its training loop: after a recovery, and after an export."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NoReturn

import torch.distributed as dist

from megatron.moevement.runtime.live import Live
from moevement_core import log


def checkpoint_and_decide_exit(live: Live, inputs: Mapping[str, Any], iteration: int) -> bool:
    """Call Megatron's function of this name, which saves and decides as its loop does after ``iteration``. Collective.

    Args:
        live: Megatron's objects on this rank.
        inputs: arguments of Megatron's ``train``, by name.
        iteration: newest committed iteration.

    Returns:
        True if the job is to exit now.
    """
    from megatron.training import get_timers, training

    interval = get_timers()("interval-time", log_level=0)
    interval.start(barrier=True)  # A save pauses this timer, and Megatron's loop has not started it yet.
    is_to_exit = training.checkpoint_and_decide_exit(
        inputs["model"], inputs["optimizer"], inputs["opt_param_scheduler"], iteration,
        live.args.num_floating_point_operations_so_far, inputs["checkpointing_context"], inputs["train_data_iterator"],
    )  # fmt: skip
    interval.stop()
    return bool(is_to_exit)


def leave() -> NoReturn:
    """End this rank as Megatron's loop does when an exit is due. Collective.

    The steps are those at the end of Megatron's ``train``, which has no function for them. All ranks exit after the
    same iteration.

    Raises:
        SystemExit: with code 0.
    """
    from megatron.training import get_tensorboard_writer, training

    if (writer := get_tensorboard_writer()) is not None:
        writer.flush()
    training.maybe_finalize_async_save(blocking=True, terminate=True)
    dist.barrier()
    sys.exit(0)


def export(live: Live, inputs: Mapping[str, Any]) -> NoReturn:
    """Save the state that a window has restored as a dense checkpoint, and end this rank. Collective.

    Args:
        live: Megatron's objects on this rank, in the state of the iteration that the window restores.
        inputs: arguments of Megatron's ``train``, by name.

    Raises:
        SystemExit: with code 0.
    """
    args = live.args
    with live.undo.nested() as undo:
        for name in ("save_interval", "non_persistent_save_interval", "exit_duration_in_mins"):
            undo.set(args, name, None)
        undo.set(args, "exit_interval", max(1, live.iteration))
        checkpoint_and_decide_exit(live, inputs, live.iteration)
    if dist.get_rank() == 0:
        log.info(f"the state of iteration {live.iteration} is a dense checkpoint in {args.save} now")
    leave()
