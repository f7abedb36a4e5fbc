"""Cleaning up Transformer Engine's FP8 after an interruption, in a process that keeps its model.

Delayed scaling has a registry in the process: at the end of a forward pass, and of a backward pass, the amaxes of all
modules in it are concatenated, reduced over the ranks of the group, and made into scales. A module enters the registry
in its first forward pass and notes in its ``fp8_meta`` that it has.

The registry of a replacement is empty. With a full one, a survivor would reduce amaxes of more modules than the
replacement does wherever a rank has several virtual stages; with an empty one and the notes left, its modules would
never register again, and their scales would stay as they are. So both go: every rank begins as a new process does, and
enters the same collectives with the same number of amaxes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_NOTES = ("buffer_index_and_autocast_key", "global_fp8_buffer_pos_fwd_recompute")
"""Names of a module's position in the registry, and in the list of scales that recomputed forward passes use again."""


def forget_regions() -> None:
    """Forget which FP8 regions and recomputations run, and empty the registry; of this process, on its main thread.

    Does the same for our own FP8 without Transformer Engine, and nothing if there is none.
    """
    from megatron.core.tensor_parallel import random

    if (manager := getattr(random, "FP8GlobalStateManager", None)) is None:
        return
    manager.reset()
    recomputation = getattr(random, "activation_recompute_forward", None)
    if isinstance(recomputation, type):  # Transformer Engine's; ours keeps nothing
        recomputation().__exit__(None, None, None)
        recomputation._is_first_fp8_module.clear()  # type: ignore[attr-defined]


def register_again(module: Any) -> None:
    """Let ``module`` register in its next forward pass; its scales and histories of amaxes stay as they are.

    Call it for every module of a model after :func:`forget_regions`.
    """
    for meta in _metas(module):
        for note in _NOTES:
            meta.pop(note, None)


def _metas(module: Any) -> Iterator[dict[str, Any]]:
    """A module has one; an operation of Transformer Engine's fused sequences has one for each direction."""
    held = vars(module)
    if isinstance(meta := held.get("fp8_meta"), dict):
        yield meta
    if isinstance(metas := held.get("_fp8_metas"), dict):
        yield from (meta for meta in metas.values() if isinstance(meta, dict))
