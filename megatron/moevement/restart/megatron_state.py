"""State of Megatron that belongs to a generation of the job, and to a rank."""

from __future__ import annotations

import gc
import os
import sys
from contextlib import suppress


def take_rank(rank: int, world: int, device: int | None = None) -> None:
    """Be ``rank`` from now on, in Megatron's global arguments and what was made of them at the start.

    Args:
        rank: of the job.
        world: how many ranks the job has.
        device: the local number of its device, which Megatron sets when it is entered; a spare holds none before.
    """
    from megatron.training import get_args, global_vars

    args = get_args()
    args.rank = rank
    if world != args.world_size:
        _take_world(world)
    if device is not None:
        args.local_rank = device
        os.environ["LOCAL_RANK"] = str(device)
    is_last = rank == args.world_size - 1  # it writes what Megatron logs
    for name in ("tensorboard", "wandb"):
        writer = getattr(global_vars, f"_GLOBAL_{name.upper()}_WRITER")
        if is_last and writer is None:
            getattr(global_vars, f"_set_{name}_writer")(args)
        elif not is_last and writer is not None:
            with suppress(Exception):  # another one goes on, and this one has no more to say
                writer.flush() if name == "tensorboard" else writer.finish()
            setattr(global_vars, f"_GLOBAL_{name.upper()}_WRITER", None)


def _take_world(world: int) -> None:
    """Be one of ``world`` ranks from now on; the global batch stays the same."""
    from megatron.core.num_microbatches_calculator import reconfigure_num_microbatches_calculator
    from megatron.training import get_args

    args = get_args()
    args.data_parallel_size = args.data_parallel_size * world // args.world_size
    args.world_size = world
    if args.moevement_expert_slots is not None:
        args.expert_model_parallel_size = args.data_parallel_size
    reconfigure_num_microbatches_calculator(
        args.rank, None, args.global_batch_size, args.micro_batch_size, args.data_parallel_size,
        args.decrease_batch_size_if_needed, args.step_batch_size_schedule, args.seq_length,
    )  # fmt: skip


def forget_generation() -> None:
    """Put away what an interrupted ``pretrain`` has left, so that it can be entered again."""
    from megatron.core import parallel_state, rerun_state_machine
    from megatron.training import get_args, global_vars

    args = get_args()
    end_data_workers()
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_global_memory_buffer()
    rerun_state_machine.destroy_rerun_state_machine()
    _forget_dispatch_buffers()
    global_vars._GLOBAL_TIMERS = None
    global_vars._set_timers(args)


def _forget_dispatch_buffers() -> None:
    """Forget DeepEP's buffers: they are made for the processes of a group, and kept for the group that takes its place.
    Not tested on GPUs.
    """
    if (module := sys.modules.get("megatron.core.transformer.moe.fused_a2a")) is not None:
        module._buffer = None  # type: ignore[attr-defined]
        module.reset_hybrid_ep_buffer()


def program_start() -> float | None:
    """Return the script's start time, to be restored before ``pretrain`` is entered again.

    Ranks reduce it where it is known, and then it is known everywhere: one that is new would not take part.
    """
    from megatron.training import training

    return training._STARTUP_TIMESTAMPS["program_start"]


def set_program_start(when: float | None) -> None:
    """Put back what :func:`program_start` gave."""
    from megatron.training import training

    training._STARTUP_TIMESTAMPS["program_start"] = when


def end_data_workers() -> None:
    """Kill the processes of data loaders.

    Asked to end, each would take its five seconds; and with ``--exit-signal-handler`` they ignore being asked.
    """
    from torch.utils.data import _utils
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

    for iterator in [one for one in gc.get_objects() if type(one) is _MultiProcessingDataLoaderIter]:
        if iterator._worker_pids_set:  # torch raises for a worker that dies, unless it has been told
            _utils.signal_handling._remove_worker_pids(id(iterator))
            iterator._worker_pids_set = False
        for worker in iterator._workers:
            worker.kill()
