"""Flags that cannot stand here, as a table: one line each, when it applies, and why."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Refusal:
    """Refusal of one flag."""

    flag: str
    value: Callable[[Namespace], Any]
    """Value that is refused: True where the flag alone says it, None or False if the refusal does not apply."""
    reason: str

    def complaint(self, args: Namespace, text: str) -> Iterator[str]:
        """Nothing, or ``text`` with ``{flag}``, its value behind it, and ``{reason}``."""
        value = self.value(args)
        if value is not None and value is not False:
            yield text.format(flag=self.flag if value is True else f"{self.flag} {value}", reason=self.reason)


def complaints(refusals: Iterable[Refusal], args: Namespace, text: str) -> Iterator[str]:
    """Yield the complaints of the refusals that apply."""
    for refusal in refusals:
        yield from refusal.complaint(args, text)


def given(name: str) -> Callable[[Namespace], Any]:
    """Return a test of whether a switch is set."""
    return lambda args: bool(getattr(args, name))


def beside(name: str, harmless: Any) -> Callable[[Namespace], Any]:
    """The value of an option, unless it is the one that does no harm."""
    return lambda args: None if (value := getattr(args, name, None)) == harmless else value
