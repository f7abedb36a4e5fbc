"""Replaced attributes are restored, newest first, and a second undo does no harm."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from moevement_core.util.undo import UndoStack


def test_everything_is_back_after_an_interruption_of_the_way_back() -> None:
    undo, owner, undone = UndoStack(), SimpleNamespace(name="before", other=1), list[str]()

    def interrupted_once() -> None:
        undone.append("x")
        if len(undone) == 1:
            raise KeyboardInterrupt

    undo.set(owner, "name", "first")
    undo.push(interrupted_once)
    undo.set(owner, "name", "second")
    assert owner.name == "second"
    with pytest.raises(KeyboardInterrupt):
        undo.close()
    undo.close()
    assert owner.name == "before"
    undo.close()
    assert owner.name == "before"


def test_what_is_put_aside_for_a_block_is_back_after_it_or_when_its_way_out_never_ran() -> None:
    undo, owner = UndoStack(), SimpleNamespace(name="before")
    with undo.nested() as inner:
        inner.set(owner, "name", "inside")
        assert owner.name == "inside"
    assert owner.name == "before"
    block = undo.nested()
    block.__enter__().set(owner, "name", "inside")
    undo.close()  # by the cleanup after the exception
    assert owner.name == "before"
    owner.name = "after"
    block.__exit__(None, None, None)  # when it is garbage-collected, at any later time
    assert owner.name == "after"
