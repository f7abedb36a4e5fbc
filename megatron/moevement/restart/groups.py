"""Process groups of one generation, and their replacement in Megatron's objects, which outlive the generation."""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass
from types import CellType
from typing import Any

import torch.distributed as dist

from moevement_core.errors import RecoveryError


@dataclass(frozen=True, eq=False)
class Groups:
    """Process groups of a generation, in the order of their creation. All generations create them in this order."""

    groups: tuple[Any, ...]
    ranks: tuple[tuple[int, ...], ...]

    @staticmethod
    def now() -> Groups:
        """Return all current process groups."""
        groups = tuple(dist.distributed_c10d._world.pg_map)
        return Groups(groups, tuple(tuple(dist.get_process_group_ranks(group)) for group in groups))


def move_to_groups(old: Groups, new: Groups) -> None:
    """Replace every reference in this process to a group of ``old`` by the matching group of ``new``.

    Raises:
        RecoveryError: the new groups do not match the old ones, or a reference cannot be replaced.
    """
    if old.ranks != new.ranks[: len(old.ranks)]:
        raise RecoveryError(
            f"{len(new.ranks)} new process groups do not match the {len(old.ranks)} groups from before the failure, in "
            "number or in ranks; old groups cannot be replaced"
        )
    replacement = {id(group): other for group, other in zip(old.groups, new.groups, strict=False) if group is not other}
    old_groups = [group for group in old.groups if id(group) in replacement]
    for find in (_holders, _holders_after_collection, _hidden_holders, _holders_among_all, _hidden_holders):
        for holder in find(old_groups):
            _replace_in(holder, replacement)
        if not _left(old_groups):
            return
    kinds = sorted(
        {type(holder).__name__ for holder in gc.get_referrers(*_left(old_groups)) if holder is not old.groups}
    )
    raise RecoveryError(
        f"{len(_left(old_groups))} process groups from before the failure are still in use, by objects of these types: "
        f"{', '.join(kinds)}"
    )


def _left(old_groups: list[Any]) -> list[Any]:
    """Return the groups that are still in use: objects besides ``old_groups`` and a :class:`Groups` refer to them."""
    return [
        old_groups[index] for index in range(len(old_groups)) if sys.getrefcount(old_groups[index]) > 3
    ]  # the argument of getrefcount is the third reference


def _holders(old_groups: list[Any]) -> list[Any]:
    """Return Megatron's collections of groups, and all objects in which ``gc`` finds a reference to an old group."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    collections = [candidate for candidate in gc.get_objects() if type(candidate) is ProcessGroupCollection]
    return collections + [
        holder
        for holder in gc.get_referrers(*old_groups)
        if holder is not old_groups and type(holder).__name__ not in ("frame", "list_iterator", "tuple_iterator")
    ]


def _holders_after_collection(old_groups: list[Any]) -> list[Any]:
    """Return the result of :func:`_holders` after a garbage collection, which removes frames in reference cycles."""
    gc.collect()
    return _holders(old_groups)


def _holders_among_all(old_groups: list[Any]) -> list[Any]:
    """Return the result of :func:`_holders` among all objects, including those from before training.

    When training begins, the garbage collector is told to ignore all objects that exist then, so :func:`_holders`
    alone does not find them.
    """
    gc.unfreeze()
    return _holders_after_collection(old_groups)


def _hidden_holders(old_groups: list[Any]) -> list[Any]:
    """Return dictionaries that hold an old group and that the garbage collector does not track."""
    wanted = {id(group) for group in old_groups}
    hidden = {
        id(referent): referent
        for referent in gc.get_referents(*gc.get_objects())
        if type(referent) is dict
        and not gc.is_tracked(referent)
        and any(id(value) in wanted for value in referent.values())
    }
    return list(hidden.values())


def _replace_in(holder: Any, replacement: dict[int, Any]) -> None:
    if isinstance(holder, dict):
        for key, value in list(holder.items()):
            if id(value) in replacement:
                holder[key] = replacement[id(value)]
        for key in [key for key in holder if id(key) in replacement]:
            holder[replacement[id(key)]] = holder.pop(key)
    elif isinstance(holder, list):
        holder[:] = [replacement.get(id(item), item) for item in holder]
    elif isinstance(holder, set):
        for item in [item for item in holder if id(item) in replacement]:
            holder.discard(item)
            holder.add(replacement[id(item)])
    elif isinstance(holder, tuple):
        whole = tuple(replacement.get(id(item), item) for item in holder)
        for outer in gc.get_referrers(holder):
            if isinstance(outer, dict | list) or hasattr(outer, "__dict__"):
                _replace_in(outer, {id(holder): whole})
    elif isinstance(holder, CellType):
        if id(holder.cell_contents) in replacement:
            holder.cell_contents = replacement[id(holder.cell_contents)]
    elif slots := [name for kind in type(holder).__mro__ for name in getattr(kind, "__slots__", ())]:
        for name in slots:
            if id(getattr(holder, name, None)) in replacement:
                object.__setattr__(holder, name, replacement[id(getattr(holder, name))])
    elif hasattr(holder, "__dict__"):
        for name, value in list(vars(holder).items()):
            if id(value) in replacement:
                # Bypass the class's __setattr__, whose side effects happened at the first assignment.
                vars(holder)[name] = replacement[id(value)]
