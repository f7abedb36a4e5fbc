"""The file in which :mod:`benchmarks.ettr` keeps what each job measured: one JSON object a line, appended as jobs end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.ettr_page import Halved
from moevement_cli.ettr_samples import Sample

FILE = Path(__file__).with_name("ettr.jsonl")


@dataclass(frozen=True, slots=True)
class Planned:
    """A job of the benchmark, by what makes it different from all others."""

    rate: float
    """Rate of links, Mbit/s; 0 without a limit."""
    strategy: str
    schedule: int
    """Schedule of kills; 0: no rank is killed."""
    is_halved: bool
    """True if links become half as fast early in the job."""
    iterations: int
    mtbf_s: float
    """Mean seconds between kills, of a job with a schedule."""


@dataclass
class Results:
    """Results of the jobs of the benchmark."""

    path: Path
    by_job: dict[Planned, Sample | Halved]
    measured: dict[Planned, str]
    """Date, machine and versions of each."""

    @classmethod
    def read(cls, path: Path) -> Results:
        """Return what a file has; nothing where there is no such file."""
        results = cls(path, {}, {})
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            results._keep(line)
        return results

    def _keep(self, line: str) -> None:
        kept = json.loads(line)
        planned = Planned(**kept["job"])
        self.by_job[planned] = (Halved if planned.is_halved else Sample)(**kept["result"])
        self.measured[planned] = kept["measured"]

    def add(self, planned: Planned, result: Sample | Halved, measured: str) -> None:
        """Keep a result, in the file, too.

        Args:
            planned: the job.
            result: of it. Its course is kept where the plot shows it, which is where links are not limited.
            measured: date, machine and versions.
        """
        if isinstance(result, Sample):
            is_plotted = not planned.rate
            losses = [(iteration, round(loss, 4)) for iteration, loss in result.losses if is_plotted]
            progress = [(round(at_s, 2), iteration) for at_s, iteration in result.progress if is_plotted]
            result = replace(result, losses=losses, progress=progress)
        line = json.dumps({"job": asdict(planned), "measured": measured, "result": asdict(result)})
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        self._keep(line)

    def samples(self, planned: list[Planned]) -> Iterator[Sample]:
        """Yield the samples of those jobs that have one, in the order of the jobs."""
        for job in planned:
            if isinstance(result := self.by_job.get(job), Sample):
                yield result

    def halved(self, planned: list[Planned]) -> Iterator[Halved]:
        """Yield the results of those jobs whose links were halved, in the order of the jobs."""
        for job in planned:
            if isinstance(result := self.by_job.get(job), Halved):
                yield result
