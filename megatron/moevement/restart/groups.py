"""Process groups of one generation, and how Megatron's objects, which outlive it, get the next one's."""

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
    """The process groups of a generation, in the order in which they were made, which is the same in every one."""

    groups: tuple[Any, ...]
    ranks: tuple[tuple[int, ...], ...]

    @staticmethod
    def now() -> Groups:
        """Return all current process groups."""
        groups = tuple(dist.distributed_c10d._world.pg_map)
        return Groups(groups, tuple(tuple(dist.get_process_group_ranks(group)) for group in groups))


def move_to_groups(old: Groups, new: Groups) -> None:
    """Replace every reference to a group of ``old``, wherever in this process, by the one of ``new``.

    Raises:
        RecoveryError: the groups are not the same ones rebuilt, or a reference cannot be replaced.
    """
    if old.ranks != new.ranks[: len(old.ranks)]:
        raise RecoveryError(
            f"{len(new.ranks)} process groups were made where there were {len(old.ranks)}, or of other ranks; they "
            "cannot be told from each other"
        )
    replacement = {id(group): other for group, other in zip(old.groups, new.groups, strict=False) if group is not other}
    gone = [group for group in old.groups if id(group) in replacement]
    for find in (_holders, _holders_after_collection, _hidden_holders, _holders_among_all, _hidden_holders):
        for holder in find(gone):
            _replace_in(holder, replacement)
        if not _left(gone):
            return
    kinds = sorted({type(holder).__name__ for holder in gc.get_referrers(*_left(gone)) if holder is not old.groups})
    raise RecoveryError(
        f"{len(_left(gone))} process groups of before the failure are still referred to, by: {', '.join(kinds)}"
    )


def _left(gone: list[Any]) -> list[Any]:
    """Return the groups that have references beside ``gone`` itself and the :class:`Groups` that they were in."""
    return [gone[index] for index in range(len(gone)) if sys.getrefcount(gone[index]) > 3]  # the argument is the third


def _holders(gone: list[Any]) -> list[Any]:
    """Return the objects that hold one of ``gone``, as far as the garbage collector knows, and Megatron's collections
    of groups.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection

    collections = [one for one in gc.get_objects() if type(one) is ProcessGroupCollection]
    return collections + [
        holder
        for holder in gc.get_referrers(*gone)
        if holder is not gone and type(holder).__name__ not in ("frame", "list_iterator", "tuple_iterator")
    ]


def _holders_after_collection(gone: list[Any]) -> list[Any]:
    """Return the holders after a collection, without frames that hold each other in a circle."""
    gc.collect()
    return _holders(gone)


def _holders_among_all(gone: list[Any]) -> list[Any]:
    """Return the holders among all objects, including those from before training, which the garbage collector skips
    since.
    """
    gc.unfreeze()
    return _holders_after_collection(gone)


def _hidden_holders(gone: list[Any]) -> list[Any]:
    """Dictionaries and tuples that hold one of ``gone`` and nothing that the garbage collector would have to know."""
    wanted = {id(group) for group in gone}
    hidden = {
        id(one): one
        for one in gc.get_referents(*gc.get_objects())
        if type(one) is dict and not gc.is_tracked(one) and any(id(value) in wanted for value in one.values())
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
                # Not by setattr: what a class does on assignment has been done.
                vars(holder)[name] = replacement[id(value)]
