"""Spinner on the terminal while a command works. The output of the command does not change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console


@contextmanager
def waiting(text: str) -> Iterator[Callable[[str], None]]:
    """Show ``text`` with a spinner on stderr until the block ends, and yield a function that changes the text."""
    with Console(stderr=True).status(text) as status:
        yield status.update
