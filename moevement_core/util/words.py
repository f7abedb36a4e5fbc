"""Phrases of numbers and nouns for log lines and messages."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return ``number`` with a noun: ``1 spare``, ``2 spares``, ``1,000 processes``.

    Args:
        number: number of objects.
        noun: singular noun.
        plural: plural noun; None to add an s to the noun.
    """
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def spares_words(ready: int, starting: int) -> str:
    """Return how many spares are ready and how many are starting: ``1 ready``, or ``0 ready, 1 starting``."""
    return f"{ready} ready" + (f", {starting} starting" if starting else "")
