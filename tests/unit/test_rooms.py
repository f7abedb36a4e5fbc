"""What is put aside comes back, newest first, and bears being undone twice."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron.moevement.runtime.rooms import Rooms


def test_everything_is_back_after_an_interruption_of_the_way_back() -> None:
    rooms, owner, undone = Rooms(), SimpleNamespace(name="before", other=1), list[str]()

    def interrupted_once() -> None:
        undone.append("x")
        if len(undone) == 1:
            raise KeyboardInterrupt

    rooms.put(owner, "name", "first")
    rooms.enter(interrupted_once)
    rooms.put(owner, "name", "second")
    rooms.put_on_instance(owner, "method", lambda: 3)
    assert (owner.name, owner.method()) == ("second", 3)
    with pytest.raises(KeyboardInterrupt):
        rooms.close()
    rooms.close()
    assert owner.name == "before"
    assert not hasattr(owner, "method")
    rooms.close()
    assert owner.name == "before"


def test_what_is_put_aside_for_a_block_is_back_after_it_or_when_its_way_out_never_ran() -> None:
    rooms, owner = Rooms(), SimpleNamespace(name="before")
    with rooms.aside() as room:
        room.put(owner, "name", "inside")
        assert owner.name == "inside"
    assert owner.name == "before"
    block = rooms.aside()
    block.__enter__().put(owner, "name", "inside")
    rooms.close()  # by whoever clears away after the exception
    assert owner.name == "before"
    owner.name = "after"
    block.__exit__(None, None, None)  # when it is collected, at any time later
    assert owner.name == "after"
