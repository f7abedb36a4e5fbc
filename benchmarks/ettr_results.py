"""File with the results of :mod:`benchmarks.ettr`: one JSON object per line, appended when a job ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.ettr_page import Halved
from moevement_cli.ettr_samples import JobSample

FILE = Path(__file__).with_name("ettr.jsonl")


@dataclass(frozen=True, slots=True)
class Planned:
    """Settings that identify a job of the benchmark."""

    rate: float
    """Rate of links in Mbit/s. The rate 0 means no limit."""
    strategy: str
    schedule: int
    """Number of the schedule of kills. 0: no rank is killed."""
    is_halved: bool
    """True if links become half as fast early in the job."""
    iterations: int
    mtbf_s: float
    """Mean seconds between kills, if the job has a schedule."""


@dataclass
class Results:
    """Results of the jobs of the benchmark."""

    path: Path
    by_job: dict[Planned, JobSample | Halved]
    measured: dict[Planned, str]
    """Date, machine and versions of each result."""

    @classmethod
    def read(cls, path: Path) -> Results:
        """Return the results in a file. They are empty if the file is missing."""
        results = cls(path, {}, {})
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            results._keep(line)
        return results

    def _keep(self, line: str) -> None:
        kept = json.loads(line)
        planned = Planned(**kept["job"])
        self.by_job[planned] = (Halved if planned.is_halved else JobSample)(**kept["result"])
        self.measured[planned] = kept["measured"]

    def add(self, planned: Planned, result: JobSample | Halved, measured: str) -> None:
        """Add a result, and append it to the file.

        Args:
            planned: settings of the job.
            result: result of the job. Its losses and progress are dropped unless links have no limit, because the plot
                shows only such jobs.
            measured: date, machine and versions.
        """
        if isinstance(result, JobSample):
            is_plotted = not planned.rate
            losses = [(iteration, round(loss, 4)) for iteration, loss in result.losses if is_plotted]
            progress = [(round(at_s, 2), iteration) for at_s, iteration in result.progress if is_plotted]
            result = replace(result, losses=losses, progress=progress)
        line = json.dumps({"job": asdict(planned), "measured": measured, "result": asdict(result)})
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        self._keep(line)

    def samples(self, planned: list[Planned]) -> Iterator[JobSample]:
        """Yield the sample of each job that has one, in the order of ``planned``."""
        for job in planned:
            if isinstance(result := self.by_job.get(job), JobSample):
                yield result

    def halved(self, planned: list[Planned]) -> Iterator[Halved]:
        """Yield the result of each job whose links were halved, in the order of ``planned``."""
        for job in planned:
            if isinstance(result := self.by_job.get(job), Halved):
                yield result
