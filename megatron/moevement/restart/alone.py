"""A rank that is new in a running job builds its model alone: what Megatron would ask of other ranks meanwhile."""

from __future__ import annotations

import fcntl
import functools
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.moevement.patches import replace_for_a_while
from moevement_core.undo import UndoStack

_DATA = "megatron.core.datasets"
"""The package whose modules build indices on rank 0 alone."""


def building_alone(undo: UndoStack) -> list[str]:
    """Reductions and broadcasts do nothing: tied embeddings, say, are summed over two stages when a model is built.

    Returns the names of those that are called, as they are.
    """
    asked: list[str] = []
    for name in ("all_reduce", "broadcast"):
        replace_for_a_while(undo, dist, name, lambda *args, name=name, **kwargs: asked.append(name))
    return asked


def building_data_alone(undo: UndoStack, cache: str | None) -> None:
    """Have a rank that is new build its data sets alone, and indices that are not in its cache, too.

    Megatron builds indices on rank 0 and lets the others wait for that. Rank 0 of a running job keeps its data sets and
    builds none. Indices follow from the seed and the data, so any rank may build them.

    Args:
        undo: ends it.
        cache: ``--data-cache-path``, whose indices are built by one process at a time; None: they are beside the data.
    """
    replace_for_a_while(undo, dist, "barrier", lambda *args, **kwargs: None)
    get_rank = dist.get_rank

    def rank_that_builds(*args: Any, **kwargs: Any) -> int:
        # Which part of the model, and so which data, a rank has follows from its own rank.
        is_data = str(sys._getframe(1).f_globals.get("__name__", "")).startswith(_DATA)
        return 0 if is_data else get_rank(*args, **kwargs)

    replace_for_a_while(undo, dist, "get_rank", rank_that_builds)
    if cache is not None:
        Path(cache).mkdir(parents=True, exist_ok=True)
        lock = open(Path(cache) / ".moevement-building", "a")  # noqa: SIM115 - until ``undo`` is closed
        undo.push(lock.close)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)


def sharing_parameter_keys(undo: UndoStack, record: list[Any], kept: Sequence[Any]) -> None:
    """Megatron's optimizer asks all ranks for the keys of their parameters: record the answers, or give ``kept``.

    They are the same on every rank. A rank that is new in a running job would ask alone. What else is asked meanwhile,
    when a dense checkpoint is loaded, is no business of this.
    """
    from megatron.training import training

    original, build, answers = dist.all_gather_object, training.get_megatron_optimizer, iter(kept)

    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        if kept:
            object_list[:] = next(answers)
        else:
            original(object_list, obj, group)
        record.append(list(object_list))

    @functools.wraps(build)
    def get_megatron_optimizer(*args: Any, **kwargs: Any) -> Any:
        with undo.nested() as inner:
            replace_for_a_while(inner, dist, "all_gather_object", all_gather_object)
            return build(*args, **kwargs)

    replace_for_a_while(undo, training, "get_megatron_optimizer", get_megatron_optimizer)
