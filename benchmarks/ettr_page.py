"""The page of :mod:`benchmarks.ettr`, from what its jobs measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.papers.common import table
from moevement_cli.ettr_samples import FREE, HEADER, Ettr, Sample, ettr_of, rows_of, saving_costs

PLOT = Path(__file__).with_name("ettr.png")
EXACT = ("dense", "gemini", "checkfreq")
"""Other systems than MoEvement that lose no update."""
OURS = "moevement"
"""Prefix of the names of MoEvement's ways to recover."""
CAP = 0.03
"""Share of training time that saving may cost after some thirty iterations: a little more than
--moevement-overhead-cap, for the noise.
"""


HALVED_AT = 40
"""The iteration in which links become half as fast: windows are settled then."""
HALVED_TIMES = 3
"""Factor by which such a job is longer than others: windows are rare by then, and each is a measurement."""


@dataclass(frozen=True)
class Halved:
    """Cost of saving in a job, before its links became half as fast and in the end."""

    strategy: str
    interval: int
    overhead: float
    low: float | None
    high: float | None
    interval_after: int
    overhead_after: float
    low_after: float | None
    high_after: float | None


@dataclass
class Jobs:
    """Results of all jobs."""

    iterations: int
    mtbf_s: float
    schedules: int
    """Number of schedules of kills."""
    samples: dict[float, list[Sample]]
    """Samples by the rate of links, Mbit/s, 0 without a limit."""
    halved: dict[float, list[Halved]]
    missing: Sequence[str]
    """Jobs that have not been run yet."""


def page(jobs: Jobs, measured: str) -> str:
    """Return the whole file.

    Args:
        jobs: what it is made of.
        measured: date, machine and versions.
    """
    tables = "\n\n".join(
        f"### {_name(rate)}\n\n{table(HEADER, rows_of(samples))}" for rate, samples in jobs.samples.items()
    )
    return f"""# What saving costs, and ETTR under the same kills

    python -m benchmarks.ettr        (writes this file; three hours; goes on from what ettr.jsonl has)

The laptop preset (pipeline 2 x expert/data 2), a rank on each of four nodes and two nodes of spares, network namespaces of
one machine under Slurm. Every node's link is limited each way (`tc tbf`), and training sends its activations and gradients
over the same links. {jobs.iterations} iterations a job; windows and intervals are what each strategy makes them
(`--moevement-window auto`). Ranks are killed by SIGKILL, a kill every {jobs.mtbf_s:g} s of the wall clock on average, every
strategy by the same {jobs.schedules} schedules.{_missing(jobs)}

- *interval*: iterations from one window, or checkpoint, to the next in the end; "3 of 26" means three snapshots.
- *overhead*: what saving costs, as the job measured it itself in the end, with a 95% interval: iterations beside which
  something is saved against those beside them beside which nothing is ([overhead.md](../docs/overhead.md)). Both are of
  one job, so it does not matter that the machine is slower in one quarter of an hour than in the next.
- *available*: the share of a job's time that failures left to it: its iterations, each counted once and as long as its
  mean, over the time that it took. *ETTR* is that, over 1 + the overhead of the job that nobody disturbed; ± is half of a
  95% interval, of what a failure takes (*lost to a kill*) and of the overhead together. Other ± are of means over jobs.
- What a job cannot see of itself is in neither: the processor time of copying, which goes on in every iteration, and
  checkpoints on disk. *An iteration*, beside that of the job that saves nothing, has all of it, and all noise, too.
- *predicted*: the simulator's ETTR for the kills that each job had (`examples/simulate/laptop.yaml` with
  `benchmarks/laptop_profile.yaml`). How long noticing and regrouping take, and how much copies to peers slow training
  down, comes from the jobs of all *other* strategies over the same links; how often state is saved from the job itself.
- *repeated* counts iterations that were run again in all jobs of the row; *notice*, *regroup* and *run again* are medians
  of what a failure took.

## What saving costs

{table(("link", "strategy", "interval", "an iteration", "overhead"), _overheads(jobs))}

{_within_cap(jobs)}

## A link that becomes half as fast

In iteration {HALVED_AT} of a job of {HALVED_TIMES * jobs.iterations}; *before* is what it had measured last until then, *after* what it had
measured in the end: it forgets what it had measured whenever its windows change.

{table(("link", "strategy", "interval before", "overhead before", "interval after", "overhead after"), _halved(jobs))}

## Who is ahead

The best of MoEvement's ways to recover (picked by these jobs) against every other system that loses no update, a kill every
{jobs.mtbf_s:g} s. *Surely*: the intervals of both do not overlap.

{table(("link", "MoEvement", "ETTR", "other", "ETTR", "ahead by", "surely"), _orders(jobs))}

## All jobs

{tables}

![ETTR, iterations over time, losses; without a limit](ettr.png)

What this machine cannot show: all ranks share two cores, so copies and digests of any strategy slow training down, which a
data centre's copy engines and idle processors would not; and a disk that is not shared by hundreds of nodes is fast, so
checkpoints to it cost next to nothing, and do not pass the links (checkfreq).

{measured}, gloo.
"""


def _missing(jobs: Jobs) -> str:
    """Return in a sentence which jobs the page does not have yet."""
    if not jobs.missing:
        return ""
    return f"\n\n**Not measured yet**, {len(jobs.missing)} jobs: {'; '.join(jobs.missing)}."


def _name(rate: float) -> str:
    return f"{rate:g} Mbit/s" if rate else "no limit"


def _overheads(jobs: Jobs) -> Iterator[Sequence[str]]:
    columns = [HEADER.index(name) for name in ("strategy", "interval", "an iteration", "overhead")]
    for rate, samples in jobs.samples.items():
        for row in rows_of([sample for sample in samples if sample.mtbf_s is None]):
            yield _name(rate), *(row[column] for column in columns)


def _within_cap(jobs: Jobs) -> str:
    """Return in a sentence which of MoEvement's jobs cost more than :data:`CAP`."""
    own = [
        (rate, sample)
        for rate, samples in jobs.samples.items()
        for sample in samples
        if sample.mtbf_s is None and sample.strategy.startswith(OURS) and sample.overhead is not None
    ]
    if not own:
        return "None of MoEvement's jobs measured its overhead."
    above = [(rate, sample) for rate, sample in own if (sample.overhead or 0.0) > CAP]
    if not above:
        return f"Each of MoEvement's {len(own)} jobs costs at most {CAP:.0%}."
    names = ", ".join(f"{sample.strategy} at {_name(rate)} ({sample.overhead:.1%})" for rate, sample in above)
    return f"Of MoEvement's {len(own)} jobs these cost more than {CAP:.0%}: {names}."


def _halved(jobs: Jobs) -> Iterator[Sequence[str]]:
    for rate, those in jobs.halved.items():
        for job in those:
            yield (
                f"{_name(rate)}, then {_name(rate / 2)}", job.strategy, str(job.interval),
                _share(job.overhead, job.low, job.high), str(job.interval_after),
                _share(job.overhead_after, job.low_after, job.high_after),
            )  # fmt: skip


def _share(share: float, low: float | None, high: float | None) -> str:
    return f"{share:.1%}" + ("" if low is None or high is None else f" ({low:.1%} to {high:.1%})")


def _orders(jobs: Jobs) -> Iterator[Sequence[str]]:
    """Yield for each link MoEvement's best ETTR beside that of each other system that loses no update."""
    for rate, samples in jobs.samples.items():
        costs, by_name = saving_costs(samples), dict[str, Ettr]()
        for name in dict.fromkeys(sample.strategy for sample in samples if sample.strategy != FREE):
            killed = [sample for sample in samples if sample.strategy == name and sample.mtbf_s is not None]
            if killed and name in costs:
                by_name[name] = ettr_of(killed, costs[name])
        own = {name: ettr for name, ettr in by_name.items() if name.startswith(OURS)}
        if not own:
            continue
        best = max(own, key=lambda name: own[name].mean)
        for name in EXACT:
            if name in by_name:
                ahead, both = own[best].mean - by_name[name].mean, own[best].half + by_name[name].half
                surely = "yes" if abs(ahead) > both else "no"
                yield _name(rate), best, str(own[best]), name, str(by_name[name]), f"{ahead:+.3f}", surely
