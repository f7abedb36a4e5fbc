"""Command-line flags, each declared as a field of a configuration dataclass. The field later holds the flag's value.

A field made by :func:`flag` carries the name, help, unit and check of its flag. :func:`add_flags` adds the flags to a
parser, and :func:`from_args` checks the parsed values and returns the dataclass.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any

from moevement_core.errors import ConfigError
from moevement_core.util.numbers import Range

Check = Callable[[str, Any], Any]
"""Function that takes the name of a flag and the value from argparse, and returns the value of the field.

Raises:
    ConfigError: the value is invalid; the message has the flag, the value and the valid values.
"""
AUTO = "auto"


@dataclass(frozen=True)
class Flag:
    """Declaration of a flag whose value is a field of a configuration dataclass."""

    name: str
    help: str
    default: Any
    type: Callable[[str], Any]
    check: Check
    metavar: str | None
    choices: Sequence[str] | None
    action: str | None
    nargs: str | None

    @property
    def dest(self) -> str:
        """Name of the flag's value in the namespace that argparse returns."""
        return self.name.lstrip("-").replace("-", "_")

    @property
    def default_value(self) -> Any:
        """Value that argparse gives if the flag is left out."""
        if self.action == "store_true":
            return False
        return list(self.default) if isinstance(self.default, tuple) else self.default

    def add_to(self, group: Any) -> None:
        """Add the flag to a parser or to an argument group."""
        options: dict[str, Any] = {"help": self.help}
        if self.action != "store_true":
            options |= {"default": self.default_value, "type": self.type, "metavar": self.metavar, "nargs": self.nargs}
            options |= {"choices": self.choices}
        if self.action is not None:
            options["action"] = self.action
        group.add_argument(self.name, **{name: value for name, value in options.items() if value is not None})


def flag(
    name: str,
    help: str,
    *,
    default: Any = None,
    type: Callable[[str], Any] = str,
    check: Check = lambda name, value: value,
    metavar: str | None = None,
    choices: Sequence[str] | None = None,
    action: str | None = None,
    nargs: str | None = None,
) -> Any:
    """Return a field of a configuration dataclass that the command line sets; its default is that of the flag.

    Args:
        name: name of the flag, with its dashes.
        help: text with the unit and the default.
        default: default in argparse, before ``check``.
        type: type of one value, for argparse.
        check: function that checks the value and returns the value of the field.
        metavar: placeholder in the help.
        choices: valid values, for argparse.
        action: action of argparse.
        nargs: number of values, for argparse.
    """
    declared = Flag(
        name,
        help,
        default=default,
        type=type,
        check=check,
        metavar=metavar,
        choices=choices,
        action=action,
        nargs=nargs,
    )
    return field(default_factory=lambda: check(name, declared.default_value), metadata={"flag": declared})


def flags_of(config: type) -> list[tuple[Field[Any], Flag]]:
    """Return the fields of a configuration dataclass that are flags, each with its declaration."""
    return [(entry, entry.metadata["flag"]) for entry in fields(config) if "flag" in entry.metadata]


def add_flags(group: Any, *configs: type) -> None:
    """Add the flags of configuration dataclasses to a parser or to an argument group."""
    for config in configs:
        for _, declared in flags_of(config):
            declared.add_to(group)


def from_args[Config](config: type[Config], args: argparse.Namespace, **others: Any) -> Config:
    """Return a configuration from parsed flags.

    Args:
        config: configuration dataclass.
        args: parsed arguments, with the flags that :func:`add_flags` added.
        others: values of the fields that are not flags.

    Raises:
        ConfigError: a value is invalid.
    """
    values = {
        entry.name: declared.check(declared.name, getattr(args, declared.dest)) for entry, declared in flags_of(config)
    }
    return config(**values, **others)


# Checks


def at_least(least: int) -> Check:
    """Return a check for a whole number of at least ``least``; the check accepts None."""

    def check(name: str, value: int | None) -> int | None:
        if value is not None and value < least:
            raise ConfigError(f"{name} {value}; needs at least {least}")
        return value

    return check


def more_than(bound: float) -> Check:
    """Return a check for a finite number above ``bound``; the check accepts None."""

    def check(name: str, value: float | None) -> float | None:
        if value is not None:
            Range(bound, is_open=True).check(name, value)
        return value

    return check


def each(check: Check, into: Callable[[Any], Any]) -> Check:
    """Return a check for a flag with several values: it calls ``check`` for each value and collects the results.

    Args:
        check: check of one value.
        into: collection of the results, such as ``tuple``.
    """
    return lambda name, values: into(check(name, value) for value in values)


def positive(default: float | None) -> Check:
    """Return a check for a number above 0; the check returns ``default`` for None."""

    def check(name: str, value: float | None) -> float | None:
        if value is None:
            return default
        if not value > 0:
            raise ConfigError(f"{name} {value}; needs more than 0")
        return value

    return check


def within(least: float, most: float = math.inf) -> Check:
    """Return a check for a finite number from ``least`` to ``most``."""

    def check(name: str, value: float) -> float:
        Range(least, most).check(name, value)
        return value

    return check


def gigabytes(name: str, value: float | None) -> float:
    """Convert gigabytes to whole bytes; return infinity for None.

    The function rounds, because a product such as ``4.1 * 1e9`` is slightly below the whole number that is meant.
    """
    checked = positive(math.inf)(name, value)
    return round(checked * 1e9) if math.isfinite(checked) else checked


def bandwidth(name: str, text: str) -> float | None:
    """Convert a rate from gigabytes per second to bytes per second; return None for ``auto``."""
    if text == AUTO:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name} {text}; needs auto, or gigabytes per second above 0")
    return value * 1e9
