"""Things that are put aside for a while and back, also by an interruption that may come at any moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Rooms:
    """What is to be undone, newest first.

    A context manager is not enough: an exception that is raised into a thread from outside may hit its way out. What
    stands here is undone by whoever comes by, once more if need be, so every step of it must bear being done twice.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def enter(self, undo: Callable[[], None]) -> None:
        """``undo`` will be called; to be said before what it undoes is done."""
        self._undo.append(undo)

    def put(self, owner: object, name: str, value: object) -> None:
        """Set an attribute, and its value of now back later."""
        before = getattr(owner, name)
        self.enter(lambda: setattr(owner, name, before))
        setattr(owner, name, value)

    def put_on_instance(self, owner: object, name: str, function: object) -> None:
        """``function`` in the place of a method of one object."""
        before = vars(owner).get(name)

        def undo() -> None:
            vars(owner).pop(name, None)
            if before is not None:
                vars(owner)[name] = before

        self.enter(undo)
        vars(owner)[name] = function

    @contextmanager
    def aside(self) -> Iterator[Rooms]:
        """A room for the time of a block; whoever closes this one closes it, too."""
        inner = Rooms()
        self.enter(inner.close)
        try:
            yield inner
        finally:
            inner.close()
            if inner.close in self._undo:
                self._undo.remove(inner.close)

    def close(self) -> None:
        """Undo everything; nothing if nothing is put aside."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
