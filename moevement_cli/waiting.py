"""A sign of life on the terminal while a command works; the output itself stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console


@contextmanager
def waiting(text: str) -> Iterator[Callable[[str], None]]:
    """Show ``text`` with a spinner on stderr, if that is a terminal, until the block ends; yields how to change it."""
    with Console(stderr=True).status(text) as status:
        yield status.update
