"""Reader of a run directory, for processes outside the job that show the run while it goes on or afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from moevement_core.errors import RunRecordError
from moevement_core.monitoring.tail import Tail
from moevement_core.run.figures import REFUSED, FigureSample, RunFigures, samples_of_processes
from moevement_core.run.job_entry import JobEntry
from moevement_core.run.record_shape import (
    event_complaint,
    line_complaint,
    processes_complaint,
    refused_connections_complaint,
)
from moevement_core.run.run_record import RunRecord
from moevement_core.util.regular_files import read_regular


class WatchedRun:
    """Reader that follows a run by the files of its run directory. One thread calls all methods.

    Args:
        folder: run directory, which need not exist yet.
    """

    def __init__(self, folder: Path) -> None:
        self.record = RunRecord(folder)
        self.figures = RunFigures()
        self.processes: list[dict[str, Any]] = []
        """Entries of ``ranks.json``, one for each process of the job."""
        self.job: JobEntry | None = None
        """Content of ``job.json``: launch and end of the newest job; None before the first job."""
        self.refused = 0
        """Number of connections whose callers lacked the job's token, from ``refused_connections.json``."""
        self._train_iterations: int | None = None
        self._start_over()

    def _start_over(self) -> None:
        self.figures = RunFigures()
        self._lines = Tail(self.record.metrics_path, line_complaint)
        self._events = Tail(self.record.events_path, event_complaint)

    def update(self) -> None:
        """Read what is new in the run directory since the last call.

        Raises:
            RunRecordError: a file in the run directory is damaged.
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
        self.refused = self._read(
            self.record.refused_connections_path, {"connections": 0}, refused_connections_complaint
        )["connections"]

    @property
    def has_ended(self) -> bool:
        """True if the newest job of the run has ended, for any reason, so that no process trains any more."""
        if self.job is not None:
            return self.job.ended_at is not None or self.job.is_abandoned
        return self.record.summary_path.exists()

    @property
    def train_iterations(self) -> int | None:
        """Number of iterations that the run's configuration asks for; None if the configuration has no number."""
        if self._train_iterations is None and self.record.config_path.exists():
            config = self.record.config()
            value = config.get("train_iters", config.get("iterations"))
            self._train_iterations = value if isinstance(value, int) else None
        return self._train_iterations

    def samples(self) -> Iterator[FigureSample]:
        """Yield the current values of all known metrics of the run."""
        yield from self.figures.samples()
        yield from samples_of_processes(self.processes)
        yield FigureSample(REFUSED, self.refused)

    def _read(self, path: Path, absent: Any, complaint_of: Callable[[Any], str | None]) -> Any:
        try:
            content = json.loads(read_regular(path))
        except FileNotFoundError:
            return absent
        except (OSError, ValueError, RecursionError) as error:
            raise RunRecordError(f"{path}: cannot be read ({error}); the file was damaged after writing") from None
        if (complaint := complaint_of(content)) is not None:
            raise RunRecordError(f"{path}: {complaint}")
        return content
