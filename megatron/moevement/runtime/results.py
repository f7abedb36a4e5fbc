"""Handling of results that are not finite, in a job that continues after failures.

Megatron validates losses and local gradients, and computes an iteration a second time if it rejects one of them. Then
it ends the job, so that a scheduler can start it on other devices: with exit code 17 if the second result differs from
the first, and with 16 if both are equal. In this project no rank ends. If the second result differs, the ranks compute
the iteration again from its beginning. If both are equal, they find the rank whose results became non-finite first, and
the coordinator replaces this rank by a spare on another node
(:meth:`moevement_core.rendezvous.coordinator.Coordinator.step`). If results are not finite even after replacements, the
batch is at fault, and the job stops.

Ranks search only after a result is rejected. Then each rank reads the tensors that it sent to other stages: values that
are not finite flow forward through the stages to the loss, and from there backward.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron.moevement.runtime.job import Job, Process
from moevement_core.errors import ResultError
from moevement_core.recovery.boundary_log import Direction
from moevement_core.restart.generation import generation, waiting_for_others

NEVER = 1 << 30
"""Result of :func:`_place` on a rank whose values are all finite; greater than any position."""
_GRADIENTS = "bucket"
"""Word that is in the messages of Megatron's gradient checks, and not in those of its loss checks."""
TRANSIENT = 2
"""Number of transient bad results after which a process is replaced.

A bad result is transient if the second pass over the iteration gives another result.
"""


def validate_first_iteration() -> None:
    """Make Megatron validate the next iteration, although it may be the first since this process started.

    Megatron does not validate the first iteration of a process, because it answers a rejected result with a checkpoint,
    and may not be able to save one before the first update. Fault-tolerant jobs need no such checkpoint. After a
    recovery, the first iteration is often the one whose result was rejected.
    """
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    get_rerun_state_machine().first_iteration_complete = True


def locate_on_recomputation(process: Process, original: Callable[..., bool], machine: Any, data_iterator: Any) -> bool:
    """Locate non-finite values before the second pass, in ``should_run_forward_backward``.

    The second pass overwrites these values. It also sends all tensors to other stages again, so the function drops the
    tensors of the first pass from the boundary log.
    """
    from megatron.core.rerun_state_machine import RerunState

    is_wanted = original(machine, data_iterator)
    if is_wanted and machine.state is RerunState.RERUNNING_IN_PLACE and generation() is not None:
        job = process.job
        job.place_of_failure = _place(job, machine)
        if job.live.boundary_log is not None:
            job.live.boundary_log.restart_iteration()
        if job.session is not None:
            job.session.auditor.executions.observe()
    return is_wanted


def interrupt_instead_of_exit(
    process: Process, original: Callable[..., tuple[bool, bool, int]], machine: Any
) -> tuple[bool, bool, int]:
    """Interrupt the iteration instead of ending all ranks, in ``should_checkpoint_and_exit``.

    Every rank calls the function, and Megatron makes all ranks agree on its result.
    """
    from megatron.core.rerun_state_machine import EXIT_CODE_RESUME_TO_DISAMBIGUATE

    decided = original(machine)
    _, is_to_exit, code = decided
    if is_to_exit and generation() is not None:
        _interrupt(process, machine, is_reproducible=code == EXIT_CODE_RESUME_TO_DISAMBIGUATE)
    return decided


def refuse_without_second_pass(
    process: Process, original: Callable[..., None], machine: Any, *args: Any, **kwargs: Any
) -> None:
    """Handle results that ``validate_result`` rejects under ``--rerun-mode disabled``.

    In this mode, the rank that rejects a result raises an error, and no other rank notices. The function raises
    :class:`ResultError` instead, which interrupts all ranks, and they compute the iteration again. If the same process
    then rejects a result of this iteration again, a spare replaces the process.
    """
    from megatron.core.rerun_state_machine import RerunMode

    if machine.mode is not RerunMode.DISABLED or generation() is None:
        return original(machine, *args, **kwargs)
    try:
        return original(machine, *args, **kwargs)
    except RuntimeError as error:
        iteration = process.job.live.iteration + 1
        is_recomputation = process.rejected_at == iteration
        process.rejected_at = iteration
        raise ResultError(str(error), [dist.get_rank()] if is_recomputation else ()) from error


def _place(job: Job, machine: Any) -> int:
    """Return the position in the order of an iteration's computation at which this rank's values were first not finite.

    Positions count the stages in the order of the forward pass, chunk by chunk; then the loss; then the stages in the
    order of the backward pass; then gradients of weights, which no stage receives. The result is :data:`NEVER` if all
    values are finite.
    """
    from megatron.core import parallel_state

    stages = parallel_state.get_pipeline_model_parallel_world_size()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    loss = stages * (job.live.args.virtual_pipeline_model_parallel_size or 1)
    rejected = machine.failed_validation_call
    if (chunk := _first_chunk(job, Direction.FORWARD, stage, stages)) is not None:
        return chunk * stages + stage
    if rejected is not None and _GRADIENTS not in rejected.caller.message:
        return loss
    if (chunk := _first_chunk(job, Direction.BACKWARD, stages - 1 - stage, stages)) is not None:
        return loss + 1 + chunk * stages + stages - 1 - stage
    return 2 * loss + 1 if rejected is not None else NEVER


def _first_chunk(job: Job, direction: Direction, depth: int, stages: int) -> int | None:
    """Return the chunk that first sent a non-finite value in ``direction``; None if no chunk did.

    Chunks are numbered in the order of ``direction``.
    """
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.core.pipeline_parallel.schedules import get_schedule_table
    from megatron.core.utils import get_model_config

    log = job.live.boundary_log
    if log is None or (order := log.first_not_finite(direction)) is None:
        return None
    chunks = job.live.args.virtual_pipeline_model_parallel_size or 1
    group = get_model_config((job.live.model or [])[0]).microbatch_group_size_per_vp_stage or stages
    passes = [chunk for _, chunk in get_schedule_table(get_num_microbatches(), chunks, group)]
    is_last = depth == stages - 1  # The last stage sends nothing of its last chunk.
    return [chunk for chunk in passes if not (is_last and chunk == chunks - 1)][order]


def _what(job: Job, machine: Any) -> str:
    """Return a description of the values that were first not finite on this rank."""
    from megatron.core import parallel_state

    chunks = job.live.args.virtual_pipeline_model_parallel_size or 1
    loss = parallel_state.get_pipeline_model_parallel_world_size() * chunks
    if job.place_of_failure < loss:
        return "found values that are not finite in its output to the next stage"
    if loss < job.place_of_failure <= 2 * loss:
        return "found values that are not finite in its gradients to the previous stage"
    return str(machine.failed_validation_call.caller.message)


def _interrupt(process: Process, machine: Any, *, is_reproducible: bool) -> None:
    """Interrupt all ranks. Collective: ranks find the suspects, the lowest suspect raises, and all others wait.

    Suspects are the ranks whose values were the first that were not finite.

    Raises:
        ResultError: on the lowest suspected rank.
    """
    job, rank, world = process.job, dist.get_rank(), dist.get_world_size()
    own = torch.tensor([job.place_of_failure], dtype=torch.int64, device=torch.cuda.current_device())
    places = torch.empty(world, dtype=torch.int64, device=own.device)
    dist.all_gather_into_tensor(places, own)
    first = int(places.min())
    suspects = [suspect for suspect, place in enumerate(places.tolist()) if place == first]
    if rank in suspects and not is_reproducible:
        process.transient_failures += 1
    if rank == suspects[0]:
        again = "in both passes" if is_reproducible else "with another result in the second pass"
        is_to_go = is_reproducible or process.transient_failures >= TRANSIENT
        others = f" (the same on ranks {', '.join(map(str, suspects))})" if len(suspects) > 1 else ""
        raise ResultError(
            f"{_what(job, machine)} in iteration {job.live.iteration + 1}, {again}{others}",
            suspects if is_to_go else (),
        )
    with waiting_for_others():
        while True:  # The interruption ends this loop.
            time.sleep(0.01)
