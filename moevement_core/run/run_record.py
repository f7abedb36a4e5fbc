"""Run directory: the files that a training run leaves on disk, and their readers.

====================  ==============================================================================
``config.yaml``       every resolved flag
``metrics.jsonl``     exactly one line for each committed iteration
``events.jsonl``      starts, evaluations, checkpoints, failures, the end (``events.py``)
``job.json``          command, versions and hardware of the newest job, and its end (``job_entry.py``)
``ranks.json``        rank, pid, host and role of every process
``refused_connections.json``  number of connections whose callers lacked the job's token; missing while it is 0
``placements/``       experts in the slots of each rank, one file for each placement of an elastic job
``tensorboard/``      Megatron's TensorBoard scalars
``logs/``             output of each rank, if the launcher collects it
``summary.json``      final losses and the state digest; present only after the end of the run
====================  ==============================================================================

The writer appends and flushes line by line. A killed run therefore leaves whole lines and at most one torn line at the
end. Readers skip the torn line, and the next append cuts it off.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from moevement_core import log
from moevement_core.errors import RunRecordError
from moevement_core.run.events import Event
from moevement_core.run.figures import RunFigures
from moevement_core.run.job_entry import JobEntry
from moevement_core.run.record_shape import event_complaint, job_complaint, line_complaint, summary_complaint
from moevement_core.util.file_modes import make_folder, opener
from moevement_core.util.lock import FolderLock
from moevement_core.util.regular_files import read_regular

_MOST_RECORD_BYTES = 1 << 40
_TAIL_BYTES = 16 << 10
"""Bytes at the end of a file that hold at least one whole line of metrics."""


class RunRecord:
    """Run directory of one run; each file has one writer at a time, and any number of readers.

    Args:
        folder: path of the directory.
        lock: this job's lock of the directory; None for readers. Once another job has taken over the lock, this object
            writes no more lines and no summary, so that the files do not mix two jobs.
    """

    def __init__(self, folder: Path, lock: FolderLock | None = None) -> None:
        self.folder = folder
        self.lock = lock
        self.config_path = folder / "config.yaml"
        self.metrics_path = folder / "metrics.jsonl"
        self.events_path = folder / "events.jsonl"
        self.job_path = folder / "job.json"
        self.ranks_path = folder / "ranks.json"
        self.refused_connections_path = folder / "refused_connections.json"
        self.summary_path = folder / "summary.json"
        self.figures = RunFigures()
        """Values of the run's metrics, from lines and events that :meth:`begin` found or this process has written."""
        self._failing = set[Path]()
        """Paths of files to which the last write failed."""

    def begin(self, config: dict[str, Any], first_iteration: int) -> None:
        """Prepare the folder for a run whose next iteration is ``first_iteration``.

        The folder may hold the record of an earlier run, which this run resumes. The method then drops the lines from
        ``first_iteration`` on, because this run will commit these iterations again.

        Raises:
            RunRecordError: the folder cannot be written, or files in it are damaged.
        """
        try:
            self._begin(config, first_iteration)
        except OSError as error:
            raise RunRecordError(
                f"--run-dir {self.folder}: {error.strerror}; give a folder that can be written"
            ) from None

    def _begin(self, config: dict[str, Any], first_iteration: int) -> None:
        make_folder(self.folder)
        self.summary_path.unlink(missing_ok=True)
        kept = [line for line in self.metrics() if line["iteration"] < first_iteration]
        _replace(self.metrics_path, "".join(_line(line) for line in kept))
        events = self.events()
        if self.events_path.exists():
            _replace(self.events_path, "".join(_line(line) for line in events))
        self.figures = RunFigures.of(kept, events)
        _replace(self.config_path, yaml.safe_dump(config, sort_keys=True))

    def take_over(self, first_iteration: int) -> None:
        """Continue the record of a running job in place of a failed writer.

        The next line will be of ``first_iteration``. The method drops the lines from this iteration on, which the job
        commits again. It reads the end of ``metrics.jsonl`` only, because all ranks wait for it. So :attr:`figures` has
        the newest line, and no sums over the run.

        Raises:
            RunRecordError: the file cannot be written, or its end is damaged.
        """
        try:
            self.summary_path.unlink(missing_ok=True)
            newest = _cut_lines_from(self.metrics_path, first_iteration)
        except OSError as error:
            raise RunRecordError(
                f"{self.metrics_path}: {error.strerror}; needs a file that can be read and written"
            ) from None
        self.figures = RunFigures()
        if newest is not None:
            self.figures.take_line(newest)

    def metric(self, **fields: Any) -> None:
        """Append a line for one committed iteration to ``metrics.jsonl``."""
        if not self._is_lost:
            self.figures.take_line(fields)
            self._try(self.metrics_path, lambda: _append(self.metrics_path, fields))

    def event(self, event: Event) -> None:
        """Append an event with the current time to ``events.jsonl``."""
        if not self._is_lost:
            fields = {"event": event.kind, "time": time.time(), **event.as_dict()}
            self.figures.take_event(fields)
            self._try(self.events_path, lambda: _append(self.events_path, fields))

    def write_ranks(self, ranks: list[dict[str, Any]]) -> None:
        """Replace the file ``ranks.json``."""
        self._try(self.ranks_path, lambda: _replace(self.ranks_path, json.dumps(ranks, indent=2) + "\n"))

    def write_job(self, entry: JobEntry) -> None:
        """Replace the file ``job.json``."""
        self._try(
            self.job_path, lambda: _replace(self.job_path, json.dumps(dataclasses.asdict(entry), indent=2) + "\n")
        )

    def job(self) -> JobEntry | None:
        """Return the content of ``job.json``: launch and end of the newest job; None if no job has written the file.

        Raises:
            RunRecordError: the file is damaged, or from another version of this project.
        """
        try:
            entry = json.loads(read_regular(self.job_path))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise RunRecordError(
                f"{self.job_path}: cannot be read ({error}); the file was damaged after writing"
            ) from None
        if (complaint := job_complaint(entry)) is not None:
            raise RunRecordError(f"{self.job_path}: {complaint}")
        known = {field.name for field in dataclasses.fields(JobEntry)} & entry.keys()
        return JobEntry(**{name: entry[name] for name in known})

    def write_refused_connections(self, count: int) -> None:
        """Replace the file ``refused_connections.json``."""
        self._try(
            self.refused_connections_path,
            lambda: _replace(self.refused_connections_path, json.dumps({"connections": count}) + "\n"),
        )

    def write_placement(self, iteration: int, placement: dict[str, Any]) -> None:
        """Write the placement of experts that is in force after ``iteration``."""
        path = self.folder / "placements" / f"iteration_{iteration}.json"

        def write() -> None:
            make_folder(path.parent)
            _replace(path, json.dumps(placement) + "\n")

        self._try(path, write)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write ``summary.json``, whose presence marks a run as finished.

        Raises:
            RunRecordError: another job has taken over the directory.
        """
        if self._is_lost:
            assert self.lock is not None
            raise RunRecordError(
                f"{self.folder}: {self.lock.lost} has taken over this run directory, so this run writes no summary.json"
            )
        self._try(self.summary_path, lambda: _replace(self.summary_path, json.dumps(summary, indent=2) + "\n"))

    def _try(self, path: Path, write: Callable[[], None]) -> None:
        """Call ``write``, which writes to ``path``; log an error instead of raising it.

        While writes fail, only the first error is logged. The next call of this method tries to write again.
        """
        try:
            write()
        except OSError as error:
            if not self._failing:
                log.warning(f"{path}: {error.strerror}; training continues, but the run record is incomplete")
            self._failing.add(path)
        else:
            if self._failing == {path}:
                log.info(f"{path} can be written again; lines that could not be written are missing")
            self._failing.discard(path)

    @property
    def _is_lost(self) -> bool:
        return self.lock is not None and self.lock.lost is not None

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of ``metrics.jsonl`` in the order of writing.

        Raises:
            RunRecordError: the lines are damaged, or of another version.
        """
        return list(_read_lines(self.metrics_path, line_complaint))

    def newest_metric(self) -> dict[str, Any] | None:
        """Return the last whole line of ``metrics.jsonl`` without reading the whole file; None if there is none.

        A line that is not a line of metrics counts as none: a script may write to a file of the same name.
        """
        if not self.metrics_path.exists():
            return None
        with self.metrics_path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n")]
        try:
            newest = json.loads(whole[-1]) if whole else None
        except ValueError:
            return None
        return newest if isinstance(newest, dict) and line_complaint(newest) is None else None

    def events(self) -> list[dict[str, Any]]:
        """Return the lines of ``events.jsonl`` in the order of writing.

        Raises:
            RunRecordError: the lines are damaged, or of another version.
        """
        return list(_read_lines(self.events_path, event_complaint))

    def config(self) -> dict[str, Any]:
        """Return the resolved flags of the run, by name.

        Raises:
            RunRecordError: the file is missing or damaged.
        """
        try:
            config = yaml.safe_load(read_regular(self.config_path).decode())
        except OSError as error:
            raise RunRecordError(f"{self.config_path}: {error.strerror}; give the --run-dir of a run") from None
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
            raise RunRecordError(f"{self.config_path}: not YAML ({' '.join(str(error).split())})") from None
        if not isinstance(config, dict):
            raise RunRecordError(f"{self.config_path}: holds {type(config).__name__}, not flags; it is damaged")
        return config

    def summary(self) -> dict[str, Any]:
        """Return the summary of a finished run.

        Raises:
            RunRecordError: the run has no summary, or the file is damaged.
        """
        try:
            summary = json.loads(read_regular(self.summary_path))
        except OSError as error:
            if not self.folder.is_dir():
                raise RunRecordError(f"{self.folder}: no such run directory") from None
            if not isinstance(error, FileNotFoundError):
                raise RunRecordError(f"{self.summary_path}: {error.strerror}; needs a file that can be read") from None
            raise RunRecordError(
                f"{self.folder}: no summary.json, so the run has not ended, or ended early; wait for its end, or "
                "resume it"
            ) from None
        except (ValueError, RecursionError) as error:
            raise RunRecordError(f"{self.summary_path}: not JSON ({error}); run the job again") from None
        if (complaint := summary_complaint(summary)) is not None:
            raise RunRecordError(f"{self.summary_path}: {complaint}")
        return dict(summary)


def _line(fields: dict[str, Any]) -> str:
    return json.dumps(fields) + "\n"


def _append(path: Path, fields: dict[str, Any]) -> None:
    with open(path, "ab", buffering=0, opener=opener) as file:
        _cut_off_torn_line(path)
        size = os.fstat(file.fileno()).st_size
        data = _line(fields).encode()
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[file.write(rest) or 0 :]
        except OSError:
            os.ftruncate(file.fileno(), size)  # Half a line would merge with the next one.
            raise


def _cut_lines_from(path: Path, first: int) -> dict[str, Any] | None:
    """Cut off the lines from iteration ``first`` on, and a torn line at the end; return the newest line that is left.

    Raises:
        OSError: the file cannot be read or cut.
        RunRecordError: a line at the end is damaged.
    """
    if not path.exists():
        return None
    nbytes = _TAIL_BYTES
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        while True:
            begin = max(0, end - nbytes)
            file.seek(begin)
            lines = file.read(end - begin).splitlines(keepends=True)
            if begin:
                begin += len(lines.pop(0))  # probably the end of a longer line
            newest, keep, at = None, begin, begin
            for line in lines:
                at += len(line)
                if line.endswith(b"\n") and (fields := _metrics_fields(path, line))["iteration"] < first:
                    newest, keep = fields, at
            if newest is not None or begin == 0:
                file.truncate(keep)
                return newest
            nbytes *= 4


def _metrics_fields(path: Path, line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict) or (complaint := line_complaint(fields)) is not None:
        reason = complaint if isinstance(fields, dict) else "no JSON object"
        raise RunRecordError(f"{path}, at the end: {reason}; the file was damaged after writing")
    return fields


def _cut_off_torn_line(path: Path) -> None:
    """Remove a torn line that a killed writer has left at the end of a file."""
    with path.open("rb") as file:
        if (end := file.seek(0, os.SEEK_END)) == 0:
            return
        file.seek(end - 1)
        if file.read(1) == b"\n":
            return
        file.seek(0)
        whole = file.read().rfind(b"\n") + 1
    os.truncate(path, whole)


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(partial, "w", encoding="utf-8", opener=opener) as file:
            file.write(text)
        os.replace(partial, path)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def _read_lines(path: Path, complaint_of: Callable[[dict[str, Any]], str | None]) -> Iterator[dict[str, Any]]:
    try:
        lines = read_regular(path, most=_MOST_RECORD_BYTES).splitlines(keepends=True)
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunRecordError(f"{path}: {error.strerror}; needs a file that can be read") from None
    for number, line in enumerate(lines, start=1):
        try:
            fields = json.loads(line)
            if not isinstance(fields, dict):
                raise ValueError(line)
        except (ValueError, RecursionError):
            if number == len(lines) and not line.endswith(b"\n"):
                return  # The line is torn, because its writer was killed.
            raise RunRecordError(f"{path}, line {number}: no JSON object; the file was damaged after writing") from None
        if (complaint := complaint_of(fields)) is not None:
            raise RunRecordError(f"{path}, line {number}: {complaint}")
        yield fields
