"""Values that the processes of a job share through its coordinator, which holds them in memory.

Values go both ways. The coordinator sets values, such as the roster, and every process may watch them. Members *report*
values to the coordinator, such as that they have left a generation. Nobody but the coordinator reads reports.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Protocol

Watcher = Callable[[str, str], None]
"""Function that is called with a key and its new value when the value changes."""
Operation = tuple[str, str, str]
"""Change of the values: a :class:`OperationKind`, a key, and a value."""


class OperationKind(StrEnum):
    """Kind of an :data:`Operation`."""

    SET = "set"
    """Sets the value of a key."""
    REPORT = "report"
    """Takes a report; the key is ``TOPIC/MEMBER``."""
    FORGET = "forget"
    """Deletes all reports on topics that begin with the key; the value is empty."""


class RequestKind(StrEnum):
    """Kind of a request on a value."""

    SET = "set"
    """Sets the value of a key."""
    CLAIM = "claim"
    """Sets the value of a key if it has none; the answer is the key's value afterwards."""
    RAISE = "raise"
    """Sets the value of a key if the number at the value's beginning is larger than that of the key's value."""
    READ = "read"
    """Reads the value of a key."""
    WATCH = "watch"
    """Reads the value of a key, and asks for all its changes."""
    REPORT = "report"
    """Reports a value to the coordinator: the part of the key before the last ``/`` is the topic, the rest a member."""


def number_of(value: str | None) -> int:
    """Return the number at the beginning of a value, which a space may follow; -1 if there is no value.

    Raises:
        ValueError: the value does not begin with a number.
    """
    return -1 if value is None else int(value.partition(" ")[0])


MOST_IN_LINE = 1 << 18
"""Number of characters of values after which a line with requests or answers ends, and the rest follows in another."""
MOST_IN_VALUE = 1 << 20
"""Largest number of characters of a value."""


def in_lines[T](entries: Iterable[T], value_of: Callable[[T], str | None]) -> Iterator[list[T]]:
    """Divide requests or answers into those of one line each, because values may be long."""
    line, size = list[T](), 0
    for entry in entries:
        line.append(entry)
        size += len(value_of(entry) or "")
        if size > MOST_IN_LINE:
            yield line
            line, size = [], 0
    if line:
        yield line


def check(kind: str, key: str, value: str | None) -> None:
    """Check a request (:meth:`Values.answer`) that has come over a connection.

    Raises:
        ValueError: the request is malformed.
    """
    needs_value = RequestKind(kind) not in (RequestKind.READ, RequestKind.WATCH)
    if not isinstance(key, str) or not isinstance(value, str if needs_value else (str, type(None))):
        raise ValueError(f"request {kind} with the key {key!r} and the value {value!r}; both need to be text")
    if value is not None and len(value) > MOST_IN_VALUE:
        raise ValueError(f"value of {key} with {len(value)} characters; the most are {MOST_IN_VALUE}")
    if kind == RequestKind.REPORT:
        int(key.rpartition("/")[2])
    elif kind == RequestKind.RAISE:
        number_of(value)


class JobValues(Protocol):
    """Methods with which a process of the job shares values. One thread calls all methods of one object."""

    def set(self, key: str, value: str) -> None:
        """Set the value of a key; return when the coordinator has it."""

    def claim(self, key: str, value: str) -> str:
        """Return the value of a key; first set ``value`` if the key has none."""

    def raise_to(self, key: str, value: str) -> None:
        """Set the value of a key if the number at its beginning is larger than before (:func:`number_of`)."""

    def read(self, key: str) -> str | None:
        """Return the coordinator's value of a key; None if it has none."""

    def report(self, key: str, value: str) -> None:
        """Report a value under ``TOPIC/MEMBER`` to the coordinator; return when the coordinator has it."""

    def watch(self, key: str) -> str | None:
        """Return the newest value of a key that has arrived here; only the first call for a key asks for it."""

    def wait_until(self, holds: Callable[[], bool], timeout_s: float = float("inf")) -> bool:
        """Wait until ``holds()``, which depends on watched values; return False if the timeout comes first."""

    def close(self) -> None:
        """Close the connection to the coordinator; a later call opens another."""


class AskedValues(ABC):
    """Part of :class:`JobValues` in which each call is one request to the coordinator, and waits for its answer."""

    def set(self, key: str, value: str) -> None:
        """Set the value of a key; return when the coordinator has it."""
        self._ask(RequestKind.SET, key, value)

    def claim(self, key: str, value: str) -> str:
        """Return the value of a key; first set ``value`` if the key has none."""
        return self._ask(RequestKind.CLAIM, key, value) or ""

    def raise_to(self, key: str, value: str) -> None:
        """Set the value of a key if the number at its beginning is larger than before (:func:`number_of`)."""
        self._ask(RequestKind.RAISE, key, value)

    def read(self, key: str) -> str | None:
        """Return the coordinator's value of a key; None if it has none."""
        return self._ask(RequestKind.READ, key, None)

    def report(self, key: str, value: str) -> None:
        """Report a value under ``TOPIC/MEMBER`` to the coordinator; return when the coordinator has it."""
        self._ask(RequestKind.REPORT, key, value)

    @abstractmethod
    def _ask(self, kind: RequestKind, key: str, value: str | None) -> str | None:
        """Send a request until it is answered, and return the answer."""


class Values:
    """Values of a job, in the process of its coordinator. One thread calls all methods."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._watchers: dict[str, dict[Watcher, None]] = {}
        """Watchers by key; a key may have watchers before it has a value."""
        self._keys_of: dict[Watcher, set[str]] = {}
        """Keys that each watcher watches."""
        self._reports: dict[str, dict[int, str]] = {}
        """Newest report of each member, by topic."""
        self._new: dict[str, dict[int, str]] = {}
        """Reports that :meth:`new_reports` has not returned yet, by topic."""
        self.has_news = False
        """True if a report has arrived; the coordinator resets it when it looks at the reports."""
        self.on_operation: Callable[[Operation], None] = lambda operation: None
        """Function that is called with each operation, before anybody else learns of it."""

    def set(self, key: str, value: str) -> None:
        """Set the value of a key, and tell its watchers."""
        if self._values.get(key) != value:
            self._values[key] = value
            self.on_operation((OperationKind.SET, key, value))
            for watcher in self._watchers.get(key, ()):
                watcher(key, value)

    def claim(self, key: str, value: str) -> str:
        """Return the value of a key; first set ``value`` if the key has none."""
        if key not in self._values:
            self.set(key, value)
        return self._values[key]

    def raise_to(self, key: str, value: str) -> None:
        """Set the value of a key if the number at its beginning is larger than before (:func:`number_of`)."""
        if number_of(value) > number_of(self._values.get(key)):
            self.set(key, value)

    def read(self, key: str) -> str | None:
        """Return the value of a key; None if it has none."""
        return self._values.get(key)

    def watch(self, key: str, watcher: Watcher) -> str | None:
        """Call ``watcher`` at each change of a key from now on; return the value of the key."""
        self._watchers.setdefault(key, {})[watcher] = None
        self._keys_of.setdefault(watcher, set()).add(key)
        return self._values.get(key)

    def forget(self, watcher: Watcher) -> None:
        """Call ``watcher`` no more."""
        for key in self._keys_of.pop(watcher, ()):
            del self._watchers[key][watcher]
            if not self._watchers[key]:
                del self._watchers[key]

    def report(self, topic: str, member: int, value: str) -> None:
        """Take a member's report on a topic. A second report with the same value is not new."""
        reports = self._reports.setdefault(topic, {})
        if reports.get(member) != value:
            reports[member] = value
            self._new.setdefault(topic, {})[member] = value
            self.has_news = True
            self.on_operation((OperationKind.REPORT, f"{topic}/{member}", value))

    def reports(self, topic: str) -> Mapping[int, str]:
        """Return the newest report of each member on a topic, by member."""
        return self._reports.get(topic, {})

    def new_reports(self, topic: str) -> dict[int, str]:
        """Return the reports on a topic that have arrived since the last call, by member."""
        return self._new.pop(topic, {})

    def forget_reports(self, prefix: str) -> None:
        """Delete all reports on topics that begin with ``prefix``."""
        for reports in (self._reports, self._new):
            for topic in [topic for topic in reports if topic.startswith(prefix)]:
                del reports[topic]
        self.on_operation((OperationKind.FORGET, prefix, ""))

    def operations(self) -> Iterator[Operation]:
        """Yield operations that make these values out of none."""
        for key, value in self._values.items():
            yield OperationKind.SET, key, value
        for topic, reports in self._reports.items():
            for member, value in reports.items():
                yield OperationKind.REPORT, f"{topic}/{member}", value

    def execute(self, operation: Operation) -> None:
        """Execute an operation of other values (:attr:`on_operation`), so that these become equal to those.

        Raises:
            ValueError: the operation is malformed.
        """
        change, key, value = operation
        if change == OperationKind.SET:
            self.set(key, value)
        elif change == OperationKind.REPORT:
            topic, _, member = key.rpartition("/")
            self.report(topic, int(member), value)
        elif change == OperationKind.FORGET:
            self.forget_reports(key)
        else:
            raise ValueError(f"operation {change!r} is unknown")

    def answer(self, kind: str, key: str, value: str | None, watcher: Watcher) -> str | None:
        """Execute a request of another process, and return the answer.

        Args:
            kind: a :class:`RequestKind`.
            key: key of the value; for a report, ``TOPIC/MEMBER``.
            value: value to set, to claim or to report; else None.
            watcher: called at each change if the request asks for changes.

        Raises:
            ValueError: the request is malformed.
        """
        check(kind, key, value)
        kind = RequestKind(kind)
        if kind is RequestKind.READ:
            return self.read(key)
        if kind is RequestKind.WATCH:
            return self.watch(key, watcher)
        assert value is not None
        if kind is RequestKind.CLAIM:
            return self.claim(key, value)
        if kind is RequestKind.SET:
            self.set(key, value)
        elif kind is RequestKind.RAISE:
            self.raise_to(key, value)
        else:
            topic, _, member = key.rpartition("/")
            self.report(topic, int(member), value)
        return None
