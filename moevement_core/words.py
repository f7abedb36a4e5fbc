"""Numbers with their nouns, for sentences."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return ``number`` with its noun: ``1 spare``, ``2 spares``, ``1,000 processes``.

    Args:
        number: how many there are.
        noun: for one.
        plural: for all other numbers; None: the noun with an s.
    """
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def spares_words(ready: int, starting: int) -> str:
    """Return how many spares there are: ``1 ready``, or ``0 ready, 1 starting``."""
    return f"{ready} ready" + (f", {starting} starting" if starting else "")
