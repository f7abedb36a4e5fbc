"""A replaced name, why it is replaced, and a way to list all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Replaced:
    """One attribute of another package that this process has replaced."""

    owner: str
    name: str
    reason: str
    original: Any


_replaced: dict[tuple[str, str], Replaced] = {}


def replace(owner: Any, name: str, new: Any, reason: str) -> None:
    """Set ``owner.name = new``, remembering the original; a name that is replaced already stays as it is."""
    key = (_path(owner), name)
    if key in _replaced:
        return
    _replaced[key] = Replaced(key[0], name, reason, getattr(owner, name, None))
    setattr(owner, name, new)


def wrap(owner: Any, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]], reason: str) -> None:
    """Like :func:`replace`, with the new value made from the original one; the original must exist."""
    if (_path(owner), name) not in _replaced:
        replace(owner, name, wrapper(getattr(owner, name)), reason)


def replaced() -> list[Replaced]:
    """All names replaced so far, in order."""
    return list(_replaced.values())


def _path(owner: Any) -> str:
    if isinstance(owner, type):
        return f"{owner.__module__}.{owner.__qualname__}"
    return str(owner.__name__)
