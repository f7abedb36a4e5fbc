"""Ranges of valid numbers, for checks of values that a user sets."""

from __future__ import annotations

import math
from dataclasses import dataclass

from moevement_core.errors import ConfigError


@dataclass(frozen=True)
class Range:
    """Range of finite numbers; NaN is never in it.

    Args:
        least: lower end.
        most: upper end.
        is_open: True to exclude ``least`` itself.
        or_infinite: True to include infinity.
    """

    least: float
    most: float = math.inf
    is_open: bool = False
    or_infinite: bool = False

    def holds(self, value: float) -> bool:
        """Return True if ``value`` is in the range."""
        if value == math.inf:
            return self.or_infinite
        is_above = self.least < value if self.is_open else self.least <= value
        return math.isfinite(value) and is_above and value <= self.most

    def __str__(self) -> str:
        """Return the range in words."""
        if self.is_open and math.isfinite(self.most):
            text = f"more than {self.least:g} and at most {self.most:g}"
        elif self.is_open:
            text = f"more than {self.least:g}"
        elif math.isfinite(self.most):
            text = f"{self.least:g} to {self.most:g}"
        else:
            text = f"{self.least:g} or more"
        return text + (" or inf" if self.or_infinite else "")

    def check(self, what: str, value: float | None) -> None:
        """Raise an error if ``value`` is not in the range. None, for a value that the user left out, passes.

        Args:
            what: name of the value, for the message.
            value: value to check.

        Raises:
            ConfigError: the value is outside the range; the message has ``what``, the value and the range.
        """
        if value is not None and not self.holds(value):
            raise ConfigError(f"{what} {value}; needs {self}")


POSITIVE = Range(0.0, is_open=True)
NOT_NEGATIVE = Range(0.0)
SHARE = Range(0.0, 1.0)
AT_LEAST_ONE = Range(1)
