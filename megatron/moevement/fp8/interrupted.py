"""Cleanup of Transformer Engine's FP8 after an interruption, in a process that keeps its model.

Delayed scaling has a registry in the process. At the end of each pass, Transformer Engine concatenates the amaxes of
all registered modules, reduces them over the ranks of the group, and derives scales. A module registers in its first
forward pass, and notes that in its ``fp8_meta``.

The registry of a replacement is empty. A survivor with a full one would reduce amaxes of more modules than the
replacement, if a rank has several virtual stages. A survivor with an empty one and the notes left would never register
its modules again, and their scales would not change. So the cleanup removes both. Then every rank starts as a new
process does, and enters the same collectives with the same number of amaxes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_NOTES = ("buffer_index_and_autocast_key", "global_fp8_buffer_pos_fwd_recompute")
"""Names of a module's position in the registry, and in the list of scales that recomputed forward passes reuse."""


def forget_regions() -> None:
    """Drop the FP8 regions and recomputations that run in this process, and empty the registry; for the main thread.

    The function does the same for this project's FP8 without Transformer Engine, and nothing without any FP8.
    """
    from megatron.core.tensor_parallel import random

    if (manager := getattr(random, "FP8GlobalStateManager", None)) is None:
        return
    manager.reset()
    recomputation = getattr(random, "activation_recompute_forward", None)
    if isinstance(recomputation, type):  # Transformer Engine's is a class with state; this project's function has none.
        recomputation().__exit__(None, None, None)
        recomputation._is_first_fp8_module.clear()  # type: ignore[attr-defined]


def reset_registration(module: Any) -> None:
    """Let ``module`` register in its next forward pass; its scales and amax histories stay unchanged.

    The caller does this for every module of a model after :func:`forget_regions`.
    """
    for meta in _metas(module):
        for note in _NOTES:
            meta.pop(note, None)


def _metas(module: Any) -> Iterator[dict[str, Any]]:
    """Yield the metadata of a module; operations of Transformer Engine's fused sequences have one per direction."""
    held = vars(module)
    if isinstance(meta := held.get("fp8_meta"), dict):
        yield meta
    if isinstance(metas := held.get("_fp8_metas"), dict):
        yield from (meta for meta in metas.values() if isinstance(meta, dict))
