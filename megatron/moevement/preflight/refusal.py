"""Table of refused flags, each with a condition and a reason."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Refusal:
    """Refusal of one flag under a condition."""

    flag: str
    value: Callable[[Namespace], Any]
    """Function that returns the refused value, or True for a flag without value. None or False means no refusal."""
    reason: str

    def complaint(self, args: Namespace, text: str) -> Iterator[str]:
        """Yield ``text`` with ``{flag}`` and ``{reason}`` filled in, if the refusal applies.

        ``{flag}`` becomes the name of the flag, followed by its value if the flag has one.
        """
        value = self.value(args)
        if value is not None and value is not False:
            yield text.format(flag=self.flag if value is True else f"{self.flag} {value}", reason=self.reason)


def complaints(refusals: Iterable[Refusal], args: Namespace, text: str) -> Iterator[str]:
    """Yield the complaints of the refusals that apply."""
    for refusal in refusals:
        yield from refusal.complaint(args, text)


def given(name: str) -> Callable[[Namespace], Any]:
    """Return a function that returns True if the switch is set."""
    return lambda args: bool(getattr(args, name))


def beside(name: str, harmless: Any) -> Callable[[Namespace], Any]:
    """Return a function that returns the value of an option, or None if it is the harmless value."""
    return lambda args: None if (value := getattr(args, name, None)) == harmless else value
