"""Global state of Megatron that a process has to change when its rank or the generation of the job changes."""

from __future__ import annotations

import gc
import os
import sys
from argparse import Namespace
from contextlib import suppress


def take_rank(args: Namespace, rank: int, world: int, device: int | None = None) -> None:
    """Set this process's rank in Megatron's global arguments and in the objects that depend on it.

    Args:
        args: Megatron's arguments.
        rank: rank in the job.
        world: number of ranks in the job.
        device: local number of the rank's device; None to keep the present number. Megatron selects the device when
            ``pretrain`` is entered, and a spare has none before that.
    """
    from megatron.training import global_vars

    args.rank = rank
    if world != args.world_size:
        _take_world(args, world)
    if device is not None:
        args.local_rank = device
        os.environ["LOCAL_RANK"] = str(device)
    is_last = rank == args.world_size - 1  # The last rank writes Megatron's logs.
    for name in ("tensorboard", "wandb"):
        writer = getattr(global_vars, f"_GLOBAL_{name.upper()}_WRITER")
        if is_last and writer is None:
            getattr(global_vars, f"_set_{name}_writer")(args)
        elif not is_last and writer is not None:
            with suppress(Exception):  # an error does no harm, because another rank writes from now on
                writer.flush() if name == "tensorboard" else writer.finish()
            setattr(global_vars, f"_GLOBAL_{name.upper()}_WRITER", None)


def _take_world(args: Namespace, world: int) -> None:
    """Set the number of ranks to ``world``; the global batch keeps its size."""
    from megatron.core.num_microbatches_calculator import reconfigure_num_microbatches_calculator

    args.data_parallel_size = args.data_parallel_size * world // args.world_size
    args.world_size = world
    if args.moevement_expert_slots is not None:
        args.expert_model_parallel_size = args.data_parallel_size
    reconfigure_num_microbatches_calculator(
        args.rank, None, args.global_batch_size, args.micro_batch_size, args.data_parallel_size,
        args.decrease_batch_size_if_needed, args.step_batch_size_schedule, args.seq_length,
    )  # fmt: skip


def forget_core() -> None:
    """Remove the global objects of Megatron's core from an interrupted generation."""
    from megatron.core import parallel_state, rerun_state_machine

    end_data_workers()
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_global_memory_buffer()
    rerun_state_machine.destroy_rerun_state_machine()
    _forget_dispatch_buffers()


def forget_timers(args: Namespace) -> None:
    """Replace the timers of Megatron-LM's trainer, because an interruption may leave the old ones running."""
    from megatron.training import global_vars

    global_vars._GLOBAL_TIMERS = None
    global_vars._set_timers(args)


def _forget_dispatch_buffers() -> None:
    """Drop DeepEP's buffers, which belong to the processes of a group. Not tested on GPUs.

    Megatron would keep the buffers if the next group compares equal to the old one.
    """
    if (module := sys.modules.get("megatron.core.transformer.moe.fused_a2a")) is not None:
        module._buffer = None  # type: ignore[attr-defined]
        module.reset_hybrid_ep_buffer()


def program_start() -> float | None:
    """Return the start time that the script gave Megatron; None if it gave none.

    A survivor restores this value before it enters ``pretrain`` again. ``pretrain`` reduces the time over ranks if it
    is set, and always sets it afterwards. So without the restoration, survivors would call a reduction that a
    replacement may not call.
    """
    from megatron.training import training

    return training._STARTUP_TIMESTAMPS["program_start"]


def set_program_start(when: float | None) -> None:
    """Restore the start time that :func:`program_start` returned."""
    from megatron.training import training

    training._STARTUP_TIMESTAMPS["program_start"] = when


def end_data_workers() -> None:
    """Kill the processes of data loaders, because a request to end takes up to five seconds for each process.

    With ``--exit-signal-handler``, the processes ignore such a request.
    """
    from torch.utils.data import _utils
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

    for iterator in [candidate for candidate in gc.get_objects() if type(candidate) is _MultiProcessingDataLoaderIter]:
        if iterator._worker_pids_set:  # Torch raises an error for a dead worker that it still watches.
            _utils.signal_handling._remove_worker_pids(id(iterator))
            iterator._worker_pids_set = False
        for worker in iterator._workers:
            worker.kill()
