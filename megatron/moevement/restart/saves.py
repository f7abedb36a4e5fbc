"""Cleanup after an interrupted dense save, whose leftovers would corrupt later saves.

The writer of each rank puts a list of the data that it has written into a queue. The rank takes one list from the queue
in each save, and the list becomes the checkpoint's description. If a save is interrupted, its list stays in the queue.
Each later checkpoint would then have the description of the checkpoint before it, and nobody would notice before one of
them is loaded. In addition, the process that writes an asynchronous save would go on writing into the files of the
repeated save.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from contextlib import suppress
from types import ModuleType

WRITERS = (
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async",
)
"""Modules that have the writers' queue: for ``--async-strategy mcore``, and for ``nvrx``.

Synchronous saves use the same queue.
"""


def forget_saves(args: Namespace, *, was_interrupted: bool) -> None:
    """End this rank's writer processes and drop the lists in their queue, after a failure.

    Args:
        args: Megatron's arguments.
        was_interrupted: True if the main thread was executing a save.
    """
    if args.async_save:
        was_interrupted = _end_writers(args) or was_interrupted
    if was_interrupted:
        forget_results()


def forget_results() -> None:
    """Drop the lists in the writers' queues, and end the processes that serve these queues."""
    for name in WRITERS:
        if (module := sys.modules.get(name)) is not None:
            _forget_results(module)


def _end_writers(args: Namespace) -> bool:
    """End the writers of asynchronous saves; return True if an asynchronous save was not complete on all ranks."""
    from megatron.training import async_utils

    queue = async_utils._async_calls_queue
    are_left = queue is not None and bool(queue.async_calls)
    if queue is not None:
        queue.async_calls.clear()  # otherwise its destructor waits until all ranks finish them
    with suppress(Exception):  # The worker may be dead.
        async_utils.reset_persistent_async_worker(args.async_strategy)
    async_utils._async_calls_queue = None
    return are_left


def _forget_results(module: ModuleType) -> None:
    """Drop the queue of a module, and end the process that serves it.

    A restart may have interrupted a request to this process. The next request would then receive the answer to the
    interrupted one.
    """
    queue, module._results_queue = module._results_queue, None  # type: ignore[attr-defined]
    if queue is not None:
        with suppress(Exception):  # The process may be dead.
            queue._manager.shutdown()
