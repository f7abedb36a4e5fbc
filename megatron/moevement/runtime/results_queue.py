"""Queue by which the writer process of a dense save reports to its rank, with a server process that imports nothing.

Megatron starts the queue's server with ``spawn``, which imports the training script again, and with it torch and
Megatron. The server would also import torch to unpickle results. The first save of each rank and of each replacement
would wait seconds for these imports, and each server would take hundreds of megabytes of host memory.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from moevement_core.restart.generation import atomic


class PickledQueue:
    """Queue whose server sees only bytes, because writer and reader pickle and unpickle the results themselves.

    Args:
        queue: proxy of a queue in a server process of ``multiprocessing``.
    """

    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def put(self, results: Any) -> None:
        """Append results to the queue."""
        self._queue.put(pickle.dumps(results))

    def get_nowait(self) -> Any:
        """Return the oldest results.

        Raises:
            queue.Empty: the queue has no results.
        """
        return pickle.loads(self._queue.get_nowait())


def queue_with_small_server(original: Callable[..., Any], *args: Any, **kwargs: Any) -> PickledQueue:
    """Start a server without imports, in place of ``get_write_results_queue``.

    No restart interrupts the start, because nothing would end a half-started server.
    """
    with atomic(), _script_hidden():
        return PickledQueue(original(*args, **kwargs))


@contextmanager
def _script_hidden() -> Iterator[None]:
    """Hide the file of the training script from ``spawn``; the script's definitions stay importable."""
    names = vars(sys.modules["__main__"])
    hidden: dict[str, Any] = {name: names.pop(name) for name in ("__spec__", "__file__") if name in names}
    names["__spec__"] = None
    try:
        yield
    finally:
        names.update(hidden)
