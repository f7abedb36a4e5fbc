"""Clock of a rank's own work in the phases of an iteration, without the time in which it waits for other ranks."""

from __future__ import annotations

from collections.abc import Iterator

from moevement_core.device import Device, DeviceEvent
from moevement_core.speed.waits import Wait, waits

PHASES = ("forward and backward pass", "update")
"""Phases of an iteration that are timed. The first one ends when the optimizer step begins. Between iterations nothing
is timed, because evaluations and logging belong to some ranks only."""


class PhaseClock:
    """Clock of one rank. The training thread calls all methods, each once an iteration, in this order.

    Args:
        device: device whose work is timed.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._marks: list[DeviceEvent] = []
        self._waited: list[list[Wait]] = []

    def begin(self) -> tuple[float, ...] | None:
        """Begin the first phase of an iteration.

        Returns:
            Seconds of own work in each of :data:`PHASES` in the iteration before; None if that iteration was not timed
            to its end, or if the device has not completed it.
        """
        seconds = self._seconds()
        waits.begin(self._device)
        waits.take()
        self._marks, self._waited = [], []
        self._mark()
        return seconds

    def begin_update(self) -> None:
        """End the forward and backward pass, and begin the update."""
        self._waited.append(waits.take())
        self._mark()

    def end(self) -> None:
        """End the update, and the timed part of the iteration."""
        self._waited.append(waits.take())
        self._mark()
        waits.end()

    def interrupted(self) -> None:
        """Drop the times of the current iteration and of the one before."""
        waits.end()
        self._marks, self._waited = [], []

    def _events(self) -> Iterator[DeviceEvent]:
        yield from reversed(self._marks)
        for waited in self._waited:
            for wait in waited:
                yield from wait

    def _mark(self) -> None:
        event = self._device.event(timing=True)
        event.record()
        self._marks.append(event)

    def _seconds(self) -> tuple[float, ...] | None:
        if len(self._waited) < len(PHASES) or not all(event.query() for event in self._events()):
            return None
        phases = zip(self._marks, self._marks[1:], self._waited, strict=False)
        return tuple(max(0.0, _elapsed_s(begin, end) - sum(_elapsed_s(*wait) for wait in waited))
                     for begin, end, waited in phases)  # fmt: skip


def _elapsed_s(begin: DeviceEvent, end: DeviceEvent) -> float:
    return begin.elapsed_ms(end) / 1e3
