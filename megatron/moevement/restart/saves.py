"""Cleaning up after an interrupted dense save, whose parts a later one would take for its own.

Each rank's writer puts the list of what it has written into a queue that a module keeps, and every save takes one list
from it once all ranks have written. A save that is interrupted in between leaves its list there; from then on each
checkpoint would be described by the list of the one before, which nobody notices until one of them is loaded. And the
process that writes an asynchronous save would go on in the files that the same save, made again, is writing.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from types import ModuleType

WRITERS = (
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async",
)
"""Modules that keep such a queue: of ``--async-strategy mcore`` and ``nvrx``, which synchronous saves use too."""


def forget_saves(was_interrupted: bool) -> None:
    """End what writes for this rank, and let go of what it has written; between two generations of the job.

    Args:
        was_interrupted: whether a save was under way on the main thread.
    """
    from megatron.training import get_args

    if get_args().async_save:
        was_interrupted = _end_writers() or was_interrupted
    if was_interrupted:
        for name in WRITERS:
            if (module := sys.modules.get(name)) is not None:
                _forget_results(module)


def _end_writers() -> bool:
    """Return whether there were saves that not all ranks had finished."""
    from megatron.training import async_utils, get_args

    queue = async_utils._async_calls_queue
    are_left = queue is not None and bool(queue.async_calls)
    if queue is not None:
        queue.async_calls.clear()  # else it waits for all ranks to finish them, when it is collected
    with suppress(Exception):  # its worker may be gone
        async_utils.reset_persistent_async_worker(get_args().async_strategy)
    async_utils._async_calls_queue = None
    return are_left


def _forget_results(module: ModuleType) -> None:
    """Forget results, with the process that keeps them: an interrupted request may have left an answer that the next
    would get.
    """
    queue, module._results_queue = module._results_queue, None  # type: ignore[attr-defined]
    if queue is not None:
        with suppress(Exception):  # it may be gone
            queue._manager.shutdown()
