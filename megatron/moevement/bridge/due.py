"""Evaluation, dense save and exit that are due after an iteration, if a failure has prevented them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.moevement.runtime.live import Live
from moevement_core.comms.exchange import from_rank_zero


def do_what_is_due(live: Live, inputs: Mapping[str, Any], iteration: int) -> None:
    """Do what Bridge's loop does after ``iteration``. Collective.

    Args:
        live: objects of this rank.
        inputs: arguments of Bridge's ``train``, by name.
        iteration: newest committed iteration.

    Raises:
        SystemExit: the job was due to exit after the iteration.
    """
    from megatron.bridge.training import train

    state = inputs["global_state"]
    validation, checkpoint = state.cfg.validation, state.cfg.checkpoint
    start, every = validation.start_eval_at_iter, validation.eval_interval
    is_due = state.train_state.do_valid and every and iteration % every == 0
    if is_due and (start is None or iteration >= start):
        assert live.loop is not None
        train.evaluate_and_print_results(
            state, f"iteration {iteration}", inputs["forward_step_func"], inputs["valid_data_iterator"],
            inputs["model"], live.loop.config, verbose=False, write_to_tensorboard=True,
            process_non_loss_data_func=inputs["process_non_loss_data_func"],
            non_loss_data_func=inputs["non_loss_data_func"], callback_manager=inputs["callback_manager"],
        )  # fmt: skip
    with live.undo.nested() as undo:
        if checkpoint.save and from_rank_zero(lambda: _is_saved(Path(checkpoint.save), iteration), bool):
            undo.set(checkpoint, "save_interval", None)
        interval = state.timers("interval-time", log_level=0)
        interval.start(barrier=True)  # A save pauses this timer, and the loop has not started it yet.
        is_to_exit = train.checkpoint_and_decide_exit(
            state, inputs["model"], inputs["optimizer"], opt_param_scheduler=inputs["scheduler"],
            num_floating_point_operations_so_far=state.train_state.floating_point_operations_so_far,
            checkpoint_manager=inputs["checkpoint_manager"], train_data_iterator=inputs["train_data_iterator"],
            pg_collection=inputs["pg_collection"], callback_manager=inputs["callback_manager"],
        )  # fmt: skip
        interval.stop()
    if is_to_exit:
        inputs["checkpoint_manager"].finalize_async_saves(state=state, blocking=True, terminate=True)
        dist.barrier()
        sys.exit(0)


def _is_saved(folder: Path, iteration: int) -> bool:
    """Return True if the checkpoint of ``iteration`` is complete: Bridge writes its metadata last."""
    return (folder / f"iter_{iteration:07d}" / "run_config.yaml").exists() and (
        folder / f"iter_{iteration:07d}" / ".metadata"
    ).exists()
