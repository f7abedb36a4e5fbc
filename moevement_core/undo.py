"""Changes that are made for a while and undone, also after an interruption that may come at any moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class UndoStack:
    """Changes to undo, the newest first.

    A context manager is not enough: an exception that is raised into a thread from outside may hit its way out. What
    is on this stack is undone by whoever closes it next, again if need be, so every undo must bear being done twice.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def push(self, undo: Callable[[], None]) -> None:
        """``undo`` will be called; to be pushed before what it undoes is done."""
        self._undo.append(undo)

    def set(self, owner: object, name: str, value: object) -> None:
        """Set an attribute; its present value is put back later."""
        before = getattr(owner, name)
        self.push(lambda: setattr(owner, name, before))
        setattr(owner, name, value)

    @contextmanager
    def nested(self) -> Iterator[UndoStack]:
        """A stack for the duration of a block; closing the outer one closes it, too."""
        inner = UndoStack()
        self.push(inner.close)
        try:
            yield inner
        finally:
            inner.close()
            if inner.close in self._undo:
                self._undo.remove(inner.close)

    def close(self) -> None:
        """Undo everything; does nothing if nothing is left."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
