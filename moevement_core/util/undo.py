"""Temporary changes that are undone even if an exception from another thread interrupts the code at any point."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class UndoStack:
    """Stack of changes to undo, the newest first.

    A context manager is not enough, because an exception from another thread may interrupt its exit. This stack keeps a
    change until it is undone, so another call of :meth:`close` undoes what an interrupted call has left. An undo
    function may therefore be called twice, and must allow that.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def push(self, undo: Callable[[], None]) -> None:
        """Add a function that undoes a change; the caller adds it before it makes the change."""
        self._undo.append(undo)

    def set(self, owner: object, name: str, value: object) -> None:
        """Set an attribute now; :meth:`close` restores its old value."""
        before = getattr(owner, name)
        self.push(lambda: setattr(owner, name, before))
        setattr(owner, name, value)

    @contextmanager
    def nested(self) -> Iterator[UndoStack]:
        """Provide an inner stack; the end of the ``with`` block closes it, and so does :meth:`close` of this stack."""
        inner = UndoStack()
        self.push(inner.close)
        try:
            yield inner
        finally:
            inner.close()
            if inner.close in self._undo:
                self._undo.remove(inner.close)

    def close(self) -> None:
        """Undo all changes on the stack, if there are any."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
