"""Text for jobs without data: about 190 KB of generated sentences, with the same bytes on every machine.

Integer arithmetic generates the text from this module's tables of words, so the bytes do not depend on the version of
Python. There are four kinds of documents with different words and forms, so that experts can specialise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

DOCUMENTS = 240
SENTENCES = 20
"""Number of sentences, or lines, in each document."""

_SUBJECTS = (
    "the keeper", "an old ferry", "the tide", "a lantern", "the harbour master", "my sister", "the north wind",
    "a grey heron", "the baker", "a small boat", "the last train", "the clockmaker",
)  # fmt: skip
_VERBS = ("waited for", "carried", "followed", "remembered", "painted", "watched", "lost", "found", "repaired", "sold")
_OBJECTS = (
    "the morning", "a copper kettle", "the long bridge", "three baskets of apples", "the letter", "a map of the coast",
    "the empty house", "her brother", "the first snow", "a box of nails", "the quiet street", "the lighthouse",
)  # fmt: skip
_TAILS = ("before dawn", "in the rain", "without a word", "on the way home", "after the storm", "every winter")
_STAPLES = ("flour", "butter", "sugar", "rice", "salt", "barley", "honey", "oil", "oats", "lentils")
_UNITS = ("spoons", "cups", "grams", "pinches")
_STEPS = ("stir in", "add", "fold in", "set aside", "warm", "weigh out")
_PLACES = ("Alder", "Birch", "Cedar", "Dogwood", "Elm", "Fir", "Gorse", "Hazel")
_STATES = ("on time", "late by 5 minutes", "late by 10 minutes", "not running", "full")


class LinearCongruential:
    """Linear congruential generator with 64 bits of state. Draws use only the high bits."""

    def __init__(self, seed: int) -> None:
        self._state = seed

    def below(self, bound: int) -> int:
        """Return the next number from 0 to ``bound - 1``."""
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self._state >> 33) % bound

    def choice(self, words: Sequence[str]) -> str:
        """Return one of ``words``, chosen by the next draw."""
        return words[self.below(len(words))]


def documents() -> list[str]:
    """Return all documents. Each document is one paragraph, with a line end at the end."""
    return [_document(number) for number in range(DOCUMENTS)]


def _document(number: int) -> str:
    draws = LinearCongruential(number)
    write, separator = _KINDS[number % len(_KINDS)]
    return separator.join(write(draws) for _ in range(SENTENCES)) + "\n"


def _story(draws: LinearCongruential) -> str:
    sentence = f"{draws.choice(_SUBJECTS)} {draws.choice(_VERBS)} {draws.choice(_OBJECTS)}"
    if draws.below(2):
        sentence += f" {draws.choice(_TAILS)}"
    return f"{sentence[0].upper()}{sentence[1:]}."


def _recipe(draws: LinearCongruential) -> str:
    amount = f"{draws.below(9) + 2} {draws.choice(_UNITS)} of {draws.choice(_STAPLES)}"
    return f"- {draws.choice(_STEPS)} {amount}, then wait {5 * (draws.below(6) + 1)} minutes"


def _sums(draws: LinearCongruential) -> str:
    left, right = draws.below(50), draws.below(50)
    return f"{left} + {right} = {left + right}; {left} < {right} is {'true' if left < right else 'false'}"


def _timetable(draws: LinearCongruential) -> str:
    origin, others = draws.choice(_PLACES), draws.below(len(_PLACES) - 1)
    target = [place for place in _PLACES if place != origin][others]
    return f"{draws.below(24):02}:{5 * draws.below(12):02} from {origin} to {target}: {draws.choice(_STATES)}"


_KINDS: tuple[tuple[Callable[[LinearCongruential], str], str], ...] = (
    (_story, " "), (_recipe, "\n"), (_sums, "\n"), (_timetable, "\n"),
)  # fmt: skip
"""Kinds of documents: the function that writes a sentence, and the separator between two sentences."""
