"""Cleanup after an interrupted dense save, whose leftovers would corrupt later saves.

Each rank's writer puts a list of the data that it has written into a queue of its module. Every save takes one list
from the queue once all ranks have written. An interrupted save leaves its list there. Each later checkpoint would then
be described by the list of the checkpoint before it, and the damage would only show when one of them is loaded. In
addition, the process that writes an asynchronous save would go on writing into the files of the repeated save.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from types import ModuleType

WRITERS = (
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async",
)
"""Modules that keep such a queue, for ``--async-strategy mcore`` and ``nvrx``; synchronous saves use them too."""


def forget_saves(was_interrupted: bool) -> None:
    """End this rank's writer processes and drop their results, between two generations of the job.

    Args:
        was_interrupted: True if the main thread was executing a save.
    """
    from megatron.training import get_args

    if get_args().async_save:
        was_interrupted = _end_writers() or was_interrupted
    if was_interrupted:
        for name in WRITERS:
            if (module := sys.modules.get(name)) is not None:
                _forget_results(module)


def _end_writers() -> bool:
    """End the writers of asynchronous saves. Return True if some saves were not complete on all ranks."""
    from megatron.training import async_utils, get_args

    queue = async_utils._async_calls_queue
    are_left = queue is not None and bool(queue.async_calls)
    if queue is not None:
        queue.async_calls.clear()  # otherwise its destructor waits until all ranks finish them
    with suppress(Exception):  # The worker may be dead.
        async_utils.reset_persistent_async_worker(get_args().async_strategy)
    async_utils._async_calls_queue = None
    return are_left


def _forget_results(module: ModuleType) -> None:
    """Drop the results and end the process that keeps them.

    An interrupted request may have left an answer, which the next request would receive.
    """
    queue, module._results_queue = module._results_queue, None  # type: ignore[attr-defined]
    if queue is not None:
        with suppress(Exception):  # The process may be dead.
            queue._manager.shutdown()
