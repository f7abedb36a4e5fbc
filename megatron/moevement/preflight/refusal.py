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
    """Function that returns the refused value; True for a flag without a value; None or False to refuse nothing."""
    reason: str

    def complaint(self, args: Namespace, text: str) -> Iterator[str]:
        """Yield ``text`` with ``{flag}`` and ``{reason}`` filled in, if the refusal applies.

        ``{flag}`` becomes the name of the flag, followed by its value if the flag has one.
        """
        value = self.value(args)
        if value is not None and value is not False:
            yield text.format(flag=self.flag if value is True else f"{self.flag} {value}", reason=self.reason)


def complaints(refusals: Iterable[Refusal], args: Namespace, text: str) -> Iterator[str]:
    """Yield a complaint for each refusal that applies to ``args``, with the wording ``text``."""
    for refusal in refusals:
        yield from refusal.complaint(args, text)


def given(name: str) -> Callable[[Namespace], Any]:
    """Return a function for :attr:`Refusal.value` that refuses the switch ``name`` if it is set."""
    return lambda args: bool(getattr(args, name))


def beside(name: str, harmless: Any) -> Callable[[Namespace], Any]:
    """Return a function for :attr:`Refusal.value` that refuses all values of an option except ``harmless``."""
    return lambda args: None if (value := getattr(args, name, None)) == harmless else value
