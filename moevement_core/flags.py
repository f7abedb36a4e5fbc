"""Command-line flags that are declared where their values are used: as fields of a configuration dataclass.

A field made by :func:`flag` has its flag's name, help, unit and check beside it; :func:`add_flags` gives them to a
parser, and :func:`from_args` reads the parsed values back, checked.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any

from moevement_core.errors import ConfigError
from moevement_core.numbers import Range

Check = Callable[[str, Any], Any]
"""Given a flag and what argparse made of its value, returns the field's value.

Raises:
    ConfigError: it cannot be; the message names the flag, the value found and what is needed.
"""
AUTO = "auto"


@dataclass(frozen=True)
class Flag:
    """Declaration of a field on the command line."""

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
        """Name in the parsed namespace."""
        return self.name.lstrip("-").replace("-", "_")

    def add_to(self, group: Any) -> None:
        """Add it to a parser, or a group of one."""
        options: dict[str, Any] = {"help": self.help}
        if self.action != "store_true":
            default = list(self.default) if isinstance(self.default, tuple) else self.default
            options |= {"default": default, "type": self.type, "metavar": self.metavar, "nargs": self.nargs}
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
    """A field of a configuration dataclass that is given on the command line.

    Args:
        name: with its dashes.
        help: with the unit and the default, in words.
        default: as argparse has it, before ``check``.
        type: of one value, for argparse.
        check: makes the field's value.
        metavar: for the help; ``choices``, ``action`` and ``nargs`` likewise as argparse takes them.
    """
    return field(metadata={"flag": Flag(name, help, default, type, check, metavar, choices, action, nargs)})


def flags_of(config: type) -> list[tuple[Field[Any], Flag]]:
    """Returns the fields of a configuration dataclass that are flags."""
    return [(each, each.metadata["flag"]) for each in fields(config) if "flag" in each.metadata]


def add_flags(group: Any, *configs: type) -> None:
    """Add the flags of configuration dataclasses to a parser, or a group of one."""
    for config in configs:
        for _, declared in flags_of(config):
            declared.add_to(group)


def from_args[Config](config: type[Config], args: argparse.Namespace, **others: Any) -> Config:
    """Returns a configuration from parsed flags.

    Args:
        config: the dataclass.
        args: with the flags of :func:`add_flags`.
        others: values of fields that are no flags.

    Raises:
        ConfigError: a value cannot be.
    """
    values = {
        each.name: declared.check(declared.name, getattr(args, declared.dest)) for each, declared in flags_of(config)
    }
    return config(**values, **others)


# Checks


def at_least(least: int) -> Check:
    """A whole number, or none."""

    def check(name: str, value: int | None) -> int | None:
        if value is not None and value < least:
            raise ConfigError(f"{name} {value}; needs at least {least}")
        return value

    return check


def each(check: Check, into: Callable[[Any], Any]) -> Check:
    """Return a check of each of several values; without any, ``into`` of nothing."""
    return lambda name, values: into(check(name, value) for value in values)


def positive(default: float | None) -> Check:
    """A number above zero; ``default`` where none is given."""

    def check(name: str, value: float | None) -> float | None:
        if value is None:
            return default
        if not value > 0:
            raise ConfigError(f"{name} {value}; needs more than 0")
        return value

    return check


def within(least: float, most: float = math.inf) -> Check:
    """A finite number from ``least`` to ``most``."""

    def check(name: str, value: float) -> float:
        Range(least, most).check(name, value)
        return value

    return check


def gigabytes(name: str, value: float | None) -> float:
    """Return a number of gigabytes in whole bytes, so that it is not a byte short of itself; infinite without a cap."""
    checked = positive(math.inf)(name, value)
    return round(checked * 1e9) if math.isfinite(checked) else checked


def bandwidth(name: str, text: str) -> float | None:
    """Gigabytes per second, in bytes per second; None for ``auto``."""
    if text == AUTO:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name} {text}; needs auto or gigabytes per second, more than 0")
    return value * 1e9
