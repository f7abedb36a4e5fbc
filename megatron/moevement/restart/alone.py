"""A rank that is new in a running job builds its model alone: what Megatron would ask of other ranks meanwhile."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from megatron.moevement.patches import replace_for_a_while
from moevement_core.undo import UndoStack


def building_alone(undo: UndoStack) -> list[str]:
    """Reductions and broadcasts do nothing: tied embeddings, say, are summed over two stages when a model is built.

    Returns the names of those that are called, as they are.
    """
    asked: list[str] = []
    for name in ("all_reduce", "broadcast"):
        replace_for_a_while(undo, dist, name, lambda *args, name=name, **kwargs: asked.append(name))
    return asked


def without_barrier(undo: UndoStack) -> None:
    """A rank that is new builds its data sets alone; indices are on disk already."""
    replace_for_a_while(undo, dist, "barrier", lambda *args, **kwargs: None)


def sharing_parameter_keys(undo: UndoStack, record: list[Any], given: Sequence[Any]) -> None:
    """Megatron's optimizer asks all ranks for the keys of their parameters: keep the answers, or give those of then.

    They are the same on every rank. A rank that is new in a running job would ask alone. What else is asked meanwhile,
    when a dense checkpoint is loaded, is no business of this.
    """
    from megatron.training import training

    original, build, answers = dist.all_gather_object, training.get_megatron_optimizer, iter(given)

    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        if given:
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
