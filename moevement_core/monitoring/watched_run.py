"""A run as its directory shows it to others, while it goes on or afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from moevement_core.errors import RunRecordError
from moevement_core.job_entry import JobEntry
from moevement_core.monitoring.figures import REJECTED, RunFigures, Sample, samples_of_processes
from moevement_core.monitoring.tail import Tail
from moevement_core.record_shape import event_complaint, line_complaint, processes_complaint, strangers_complaint
from moevement_core.regular_files import read_regular
from moevement_core.run_record import RunRecord


class WatchedRun:
    """Reads what is new in a run directory each time it is asked to; for one thread.

    Args:
        folder: the run directory, which need not be there yet.
    """

    def __init__(self, folder: Path) -> None:
        self.record = RunRecord(folder)
        self.figures = RunFigures()
        self.processes: list[dict[str, Any]] = []
        """Who takes part, as ``ranks.json`` has it."""
        self.job: JobEntry | None = None
        """How the newest job was launched and how it ended, as ``job.json`` has it."""
        self.rejected = 0
        """Values in the job's store that did not count, as ``strangers.json`` has them."""
        self._train_iterations: int | None = None
        self._start_over()

    def _start_over(self) -> None:
        self.figures = RunFigures()
        self._lines = Tail(self.record.metrics_path, line_complaint)
        self._events = Tail(self.record.events_path, event_complaint)

    def update(self) -> None:
        """Take in what is new.

        Raises:
            RunRecordError: the record is damaged.
        """
        lines, events = self._lines.read(), self._events.read()
        if lines.is_rewritten or events.is_rewritten:
            self._start_over()
            lines, events = self._lines.read(), self._events.read()
        for line in lines.lines:
            self.figures.take_line(line)
        for event in events.lines:
            self.figures.take_event(event)
        self.job = self.record.job()
        self.processes = self._read(self.record.ranks_path, [], processes_complaint)
        self.rejected = self._read(self.record.strangers_path, {"values": 0}, strangers_complaint)["values"]

    @property
    def has_ended(self) -> bool:
        """Whether no process of it trains any more, whatever ended it."""
        if self.job is not None:
            return self.job.ended_at is not None or self.job.is_abandoned
        return self.record.summary_path.exists()

    @property
    def train_iterations(self) -> int | None:
        """How many the run is to have, as its configuration says; None where it does not."""
        if self._train_iterations is None and self.record.config_path.exists():
            config = self.record.config()
            given = config.get("train_iters", config.get("iterations"))
            self._train_iterations = given if isinstance(given, int) else None
        return self._train_iterations

    def samples(self) -> Iterator[Sample]:
        """Every figure that is known."""
        yield from self.figures.samples()
        yield from samples_of_processes(self.processes)
        yield Sample(REJECTED, self.rejected)

    def _read(self, path: Path, absent: Any, complaint_of: Callable[[Any], str | None]) -> Any:
        try:
            found = json.loads(read_regular(path))
        except FileNotFoundError:
            return absent
        except (OSError, ValueError, RecursionError) as error:
            raise RunRecordError(f"{path}: cannot be read ({error}); the file was damaged after writing") from None
        if (complaint := complaint_of(found)) is not None:
            raise RunRecordError(f"{path}: {complaint}")
        return found
