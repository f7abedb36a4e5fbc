"""Record that a generation is interrupted, which ranks and the coordinator make and which every rank watches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from datetime import timedelta
from typing import override

import torch.distributed as dist
from nvidia_resiliency_ext.inprocess.attribution import Interruption, InterruptionRecord
from nvidia_resiliency_ext.inprocess.store import StoreMixin

from moevement_core.rendezvous.roster import INTERRUPTED, LEAVING
from moevement_core.rendezvous.values import JobValues, number_of


def is_interrupted(values: JobValues, generation: int) -> bool:
    """Return True if the coordinator knows that a generation is interrupted; the call is one request to it."""
    return number_of(values.read(INTERRUPTED)) >= generation


class GenerationStore(StoreMixin):
    """Record of a generation's interruption, for the thread of nvidia-resiliency-ext that watches a rank.

    The class replaces the methods of that library's ``StoreMixin`` which the thread uses. That thread alone waits; any
    thread may call the other methods, which use a client of their own for the call.

    Args:
        generation: number of the generation; a later generation's record counts as well.
        watching: client of the job's values for the thread that waits. A process keeps it for all generations.
        connect: returns a new client of the job's values.
    """

    def __init__(self, generation: int, watching: JobValues, connect: Callable[[], JobValues]) -> None:
        self.generation, self._watching, self._connect = generation, watching, connect

    @override
    def record_interrupted(self, records: Iterable[InterruptionRecord] | None = None) -> None:
        # Several processes may record at once, and the first record stands.
        text = ",".join(f"{record.rank}:{record.interruption.name}" for record in records or ())
        with closing(self._connect()) as client:
            client.raise_to(INTERRUPTED, f"{self.generation} {text}")

    @override
    def lock_interruption_records(self) -> None:
        """Do nothing: later records cannot change the first record, so it needs no lock."""

    @override
    def get_interruption_records(self) -> list[InterruptionRecord]:
        _, _, text = (self._watching.watch(INTERRUPTED) or "").partition(" ")
        pairs = [item.split(":", 1) for item in text.split(",") if item]
        return [InterruptionRecord(int(rank), Interruption[name]) for rank, name in pairs]

    def report_leaving(self, member: int, phase: str) -> None:
        """Report to the coordinator the phase that a member has reached in leaving its generation."""
        with closing(self._connect()) as client:
            client.report(f"{LEAVING.format(self.generation)}/{member}", phase)

    @override
    def wait_for_interrupted(self, timeout: timedelta) -> None:
        try:
            has_come = self._watching.wait_until(self.is_interrupted, timeout.total_seconds())
        except TimeoutError:  # The thread of the library goes on only after an error of the store.
            has_come = False
        if not has_come:
            raise dist.DistStoreError(f"generation {self.generation} is not interrupted")

    def is_interrupted(self) -> bool:
        """Return True if the generation is interrupted, as far as the client of the thread that waits knows."""
        return number_of(self._watching.watch(INTERRUPTED)) >= self.generation
