"""Progress display of a launcher whose ranks write to files: a live line on a terminal, otherwise a line every 10 s."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from moevement_core import log
from moevement_core.run.run_record import RunRecord

PLAIN_EVERY_S = 10.0
OURS = "moevement: "
"""Beginning of every line that this project prints; it distinguishes these lines from Megatron's."""


class Progress:
    """Display that shows new metrics of a run, and lines that this project has written to the output of rank 0.

    Use it as a context manager.

    Args:
        run_dir: run directory with the metrics; None: show no metrics.
        total: number of the last iteration; None: unknown.
        log: file with the output of rank 0; None: show no output.
    """

    def __init__(self, run_dir: Path | None, total: int | None, log: Path | None = None) -> None:
        self._record = RunRecord(run_dir) if run_dir is not None else None
        self._log = log
        self._log_offset = 0
        self._total = total
        self._offset = 0
        self._last: dict[str, Any] = {}
        self._printed: dict[str, Any] = {}
        self._plain_due_s = time.monotonic() + PLAIN_EVERY_S
        self._started_s = time.monotonic()
        self._earlier = _identity(self._record.metrics_path) if self._record is not None else None
        self._console = Console(file=sys.stdout)
        self._bar: Bar | None = None

    def __enter__(self) -> Progress:
        if self._record is not None and self._console.is_terminal:
            self._bar = Bar(
                TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}"), TimeElapsedColumn(), TextColumn("eta"), TimeRemainingColumn(),
                console=self._console,
            )  # fmt: skip
            self._task = self._bar.add_task("starting", total=self._total, numbers="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._last and self._last is not self._printed:
            self._print_plain()

    def print_line(self, text: str) -> None:
        """Print a line of the launcher now, above the live line if there is one."""
        self._console.print(f"{OURS}{text}", markup=False, highlight=False, soft_wrap=True)

    def follow(self, log: Path) -> None:
        """Show the rest of the output of the process that was rank 0, and then the output of its replacement.

        Args:
            log: file with the output of the process that is rank 0 now.
        """
        if log != self._log:
            self._show_our_lines()
            self._log, self._log_offset = log, 0

    def update(self) -> None:
        """Read and display new lines and metrics; the watching launcher calls it a few times a second."""
        try:  # A user may remove the folder during the call.
            self._show_our_lines()
            line = self._newest_line() if self._record is not None else None
        except OSError:
            return
        if not line:
            return
        self._last = line
        numbers = f"loss {line['loss']:.3f}  {line.get('tokens_per_s') or 0:,.0f} tokens/s" if _has_loss(line) else ""
        if self._bar is not None:
            self._bar.update(self._task, description="training", completed=line["iteration"], numbers=numbers)
        elif time.monotonic() >= self._plain_due_s:
            self._print_plain()

    def _show_our_lines(self) -> None:
        """Print messages that this project has newly written to the output of rank 0, such as a failed checkpoint."""
        if self._log is None or not self._log.exists():
            return
        if (size := self._log.stat().st_size) < self._log_offset:  # The file was rotated.
            self._log_offset = 0
        if size <= self._log_offset:
            return
        with self._log.open("rb") as file:
            file.seek(self._log_offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._log_offset += len(line)
                text = line.decode(errors="replace").rstrip()
                if text.startswith(log.PREFIXES):
                    self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _print_plain(self) -> None:
        line = self._printed = self._last
        self._plain_due_s = time.monotonic() + PLAIN_EVERY_S
        end = f"/{self._total}" if self._total else ""
        loss = f", loss {line['loss']:.3f}" if _has_loss(line) else ""
        print(f"iteration {line['iteration']}{end}{loss}, {self._remaining()}", flush=True)

    def _remaining(self) -> str:
        done = self._last["iteration"]
        if self._total is None or done >= self._total:
            return f"{time.monotonic() - self._started_s:.0f} s"
        return f"{(self._total - done) * (self._last.get('iteration_s') or 0):.0f} s to go"

    def _newest_line(self) -> dict[str, Any] | None:
        assert self._record is not None
        path = self._record.metrics_path
        # The file belongs to an earlier run until this run has replaced it.
        if not path.exists() or path.stat().st_size == self._offset or _identity(path) == self._earlier:
            return None
        self._offset = path.stat().st_size
        return self._record.newest_metric()


def _identity(path: Path) -> tuple[int, int] | None:
    """Return the device and inode of a file, which change when another file takes its path; None if it is missing."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _has_loss(line: dict[str, Any]) -> bool:
    return isinstance(line.get("loss"), float)
