"""Building of model and data sets by a replacement alone, while all survivors keep theirs and do not build."""

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
from moevement_core.util.undo import UndoStack

_DATA = "megatron.core.datasets"
"""Package of Megatron that builds data sets. Its modules build index files on rank 0 alone."""


def building_without_others(undo: UndoStack) -> list[str]:
    """Make reductions and broadcasts do nothing while a replacement builds its model.

    Survivors would not take part in these calls. For example, Megatron sums tied embeddings over two stages when it
    builds a model, and survivors build none.

    Returns:
        A list that receives the name of each skipped call.
    """
    asked: list[str] = []
    for name in ("all_reduce", "broadcast"):
        replace_for_a_while(undo, dist, name, lambda *args, name=name, **kwargs: asked.append(name))
    return asked


def building_data_without_others(undo: UndoStack, cache: str | None) -> None:
    """Make a replacement build its data sets alone, including index files that its cache lacks.

    Megatron builds index files on rank 0 while all other ranks wait. But after a failure, rank 0 may be a survivor,
    which keeps its data sets and builds none. Any rank may build index files, because they follow from seed and data.

    Args:
        undo: stack that ends the replacement of torch's functions.
        cache: value of ``--data-cache-path``, where only one process at a time builds index files; None if index files
            lie beside the data.
    """
    replace_for_a_while(undo, dist, "barrier", lambda *args, **kwargs: None)
    get_rank = dist.get_rank

    def rank_that_builds(*args: Any, **kwargs: Any) -> int:
        # Other modules see the true rank, which determines this rank's part of the model and of the data.
        is_data = str(sys._getframe(1).f_globals.get("__name__", "")).startswith(_DATA)
        return 0 if is_data else get_rank(*args, **kwargs)

    replace_for_a_while(undo, dist, "get_rank", rank_that_builds)
    if cache is not None:
        Path(cache).mkdir(parents=True, exist_ok=True)
        lock = open(Path(cache) / ".moevement-building", "a")  # noqa: SIM115 - ``undo`` closes it
        undo.push(lock.close)
        with suppress(OSError):  # some file systems have no locks
            fcntl.flock(lock, fcntl.LOCK_EX)


def sharing_parameter_keys(undo: UndoStack, record: list[Any], kept: Sequence[Any]) -> None:
    """Record the parameter keys that Megatron's optimizer gathers, while Megatron-LM's trainer builds it.

    Gathers outside of the optimizer's construction, for example in loading a dense checkpoint, are not affected. The
    arguments are those of :func:`sharing_gathers`.
    """
    from megatron.training import training

    build = training.get_megatron_optimizer

    @functools.wraps(build)
    def get_megatron_optimizer(*args: Any, **kwargs: Any) -> Any:
        with undo.nested() as inner:
            sharing_gathers(inner, record, kept)
            return build(*args, **kwargs)

    replace_for_a_while(undo, training, "get_megatron_optimizer", get_megatron_optimizer)


def sharing_gathers(undo: UndoStack, record: list[Any], kept: Sequence[Any]) -> None:
    """Record the results of all gathers of objects from now on, or use ``kept`` results instead.

    An optimizer gathers the keys of its parameters, which are equal on all ranks. A replacement cannot gather them,
    because survivors do not gather.

    Args:
        undo: stack that ends the replacement of torch's function.
        record: list to which the result of each gather is appended.
        kept: recorded results that are used in place of a gather; empty on a rank that gathers.
    """
    original, answers = dist.all_gather_object, iter(kept)

    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None, **options: Any) -> None:
        if kept:
            object_list[:] = next(answers)
        else:
            original(object_list, obj, group, **options)
        record.append(list(object_list))

    replace_for_a_while(undo, dist, "all_gather_object", all_gather_object)
