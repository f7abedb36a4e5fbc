"""Which numbers can be: a range by its name, checked where a dataclass is made of what a user has said."""

from __future__ import annotations

import math
from dataclasses import dataclass

from moevement_core.errors import ConfigError


@dataclass(frozen=True)
class Range:
    """Finite numbers between two ends; never NaN.

    Args:
        least: the lower end.
        most: the upper end.
        is_open: whether ``least`` itself is too little.
        or_infinite: whether infinity is a number of it, too.
    """

    least: float
    most: float = math.inf
    is_open: bool = False
    or_infinite: bool = False

    def holds(self, value: float) -> bool:
        """Return whether ``value`` is in the range."""
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
        """Raise unless ``value`` is one of them; None is what was left out.

        Raises:
            ConfigError: it is none; the message has ``what`` and the range.
        """
        if value is not None and not self.holds(value):
            raise ConfigError(f"{what} {value}; needs {self}")


POSITIVE = Range(0.0, is_open=True)
NOT_NEGATIVE = Range(0.0)
SHARE = Range(0.0, 1.0)
AT_LEAST_ONE = Range(1)
