"""Cleanup of Transformer Engine's FP8 state after an interruption, in a process that keeps the model.

For delayed scaling, Transformer Engine has a registry of modules in each process. At the end of each pass, it
concatenates the amaxes of all registered modules, reduces them over the ranks of a group, and derives scales. A module
registers in its first forward pass, and stores its position in the registry in its ``fp8_meta``.

A replacement begins with an empty registry. If a survivor kept its registry, and ranks have several virtual stages, the
survivor would reduce the amaxes of more modules than the replacement. If a survivor emptied only the registry, its
modules would never register again, and their scales would never change. The cleanup therefore empties the registry and
removes the stored positions. Then every rank is like a new process, and enters the same collectives with the same
number of amaxes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_NOTES = ("buffer_index_and_autocast_key", "global_fp8_buffer_pos_fwd_recompute")
"""Keys of ``fp8_meta`` with a module's position in the registry, and in the list of scales for recomputations."""


def forget_regions() -> None:
    """Drop the FP8 regions and recomputations of this process, and empty the registry.

    The main thread calls it after an interruption. The function also cleans up this project's FP8, which is used
    without Transformer Engine. In a job without FP8 it does nothing.
    """
    from megatron.core.tensor_parallel import random

    if (manager := getattr(random, "FP8GlobalStateManager", None)) is None:
        return
    manager.reset()
    recomputation = getattr(random, "activation_recompute_forward", None)
    if isinstance(recomputation, type):  # a class with state in Transformer Engine, a function in this project
        recomputation().__exit__(None, None, None)
        recomputation._is_first_fp8_module.clear()  # type: ignore[attr-defined]


def reset_registration(module: Any) -> None:
    """Make ``module`` register again in its next forward pass; its scales and amax histories stay unchanged.

    The caller does this for every module of a model after :func:`forget_regions`.
    """
    for meta in _metas(module):
        for note in _NOTES:
            meta.pop(note, None)


def _metas(module: Any) -> Iterator[dict[str, Any]]:
    """Yield the FP8 metadata of a module; a module of fused operations has one dictionary for each direction."""
    held = vars(module)
    if isinstance(meta := held.get("fp8_meta"), dict):
        yield meta
    if isinstance(metas := held.get("_fp8_metas"), dict):
        yield from (meta for meta in metas.values() if isinstance(meta, dict))
