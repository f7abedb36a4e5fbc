"""Page of :mod:`benchmarks.ettr`, made from the results of its jobs."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.papers.common import table
from moevement_cli.ettr_samples import FREE, HEADER, Ettr, JobSample, ettr_of, rows_of, saving_costs

PLOT = Path(__file__).with_name("ettr.png")
EXACT = ("dense", "gemini", "checkfreq")
"""Systems other than MoEvement that lose no update."""
OURS = "moevement"
"""Prefix of the names of MoEvement's strategies."""
CAP = 0.03
"""Share of training time that saving may cost after about thirty iterations.

It is a little more than --moevement-overhead-cap, because measurements have noise.
"""


HALVED_AT = 80
"""Iteration in which links become half as fast. The size of windows no longer changes by then."""


@dataclass(frozen=True)
class Halved:
    """Overhead of saving in a job whose links became half as fast: the last value before that, and the final value."""

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
    samples: dict[float, list[JobSample]]
    """Samples by the rate of links in Mbit/s. The rate 0 means no limit."""
    halved: dict[float, list[Halved]]
    missing: Sequence[str]
    """Names of the jobs that have not run yet."""


def page(jobs: Jobs, measured: str) -> str:
    """Return the text of the page.

    Args:
        jobs: results of the jobs.
        measured: date, machine and versions.
    """
    tables = "\n\n".join(
        f"### {_name(rate)}\n\n{table(HEADER, rows_of(samples))}" for rate, samples in jobs.samples.items()
    )
    return f"""# What saving costs, and ETTR under the same kills

    python -m benchmarks.ettr        (writes this file; three hours; goes on from what ettr.jsonl has)

Each job trains the laptop preset (pipeline 2 x expert/data 2) with one rank on each of four nodes, and two spare nodes. The
nodes are network namespaces of one machine under Slurm. `tc tbf` limits each link in both directions, and training sends
activations and gradients over the same links. A job has {jobs.iterations} iterations. Each strategy chooses its windows and intervals
(`--moevement-window auto`). In jobs with kills, SIGKILL ends one rank in each {jobs.mtbf_s:g} s of the wall clock, at a
random moment of them. All strategies have the same kills{_schedules(jobs)}.{_missing(jobs)}

- *interval*: iterations from one window or checkpoint to the next, at the end of the job; "3 of 26" means three snapshots.
- *overhead*: cost of saving that the job itself had measured at its end, with a 95% interval. The job compares iterations
  during which it saves with neighbouring iterations during which it does not ([overhead.md](../docs/overhead.md)). Both are of
  one job, so it does not matter that the machine is slower in one quarter of an hour than in the next.
- *available*: share of a job's time that was not lost to failures: iterations, each counted once, times their mean duration,
  over the duration of the job. *ETTR* is *available* divided by 1 + the cost of saving: for a job with kills, the mean of the
  overheads that it had measured in its iterations, because windows may change when ranks fail often; otherwise, and if it had
  measured too little, the overhead of the job without kills. Its ± is half of a 95% interval for the time lost per failure
  (*lost to a kill*) and the overhead together. Other ± are for means over jobs.
- Neither *overhead* nor *ETTR* has costs that are the same in every iteration: the processor time of copying, and checkpoints
  on disk. The difference in *an iteration* to the job that saves nothing has these costs, and all noise.
- *predicted*: the simulator's ETTR for the kills that each job had (`examples/simulate/laptop.yaml` with
  `benchmarks/laptop_profile.yaml`). The times to notice and regroup come from the jobs of all *other* strategies over the same
  links. The slow-down by copies comes from the overheads of all other strategies over all links: two factors, one for copies to
  the host and one for copies to peers, fitted by least squares. The job itself gives its windows, the iteration at each kill,
  and the time of an iteration.
- *repeated*: iterations that all jobs of the row executed again, together. *notice*, *regroup* and *run again*: median
  seconds of a failure.

## What saving costs

{table(("link", "strategy", "interval", "an iteration", "overhead"), _overheads(jobs))}

{_within_cap(jobs)}

## A link that becomes half as fast

Links become half as fast in iteration {HALVED_AT} of {jobs.iterations}. *before*: the overhead that the job had measured last before that.
*after*: the overhead that it had measured at its end. A job forgets its measurements whenever its windows change.

{table(("link", "strategy", "interval before", "overhead before", "interval after", "overhead after"), _halved(jobs))}

## Who is ahead

The strategy of MoEvement that is best in these jobs, against every other system that loses no update, with a kill every
{jobs.mtbf_s:g} s. *surely*: the intervals of the two do not overlap. The last two columns say why: how far MoEvement is ahead in the
share of time that failures left to training (*available*), and by how many points saving cost it more.

{table(ORDER_HEADINGS, _orders(jobs))}

## All jobs

{_prediction_errors(jobs)}

{tables}

![ETTR, iterations over time, losses; without a limit](ettr.png)

This machine differs from a data centre in two ways. All ranks share two cores, so copies and digests of any strategy slow
training; in a data centre, copy engines and idle processors do this work. And no other nodes share the disk, so
checkpoints to it (checkfreq) cost next to nothing, and do not use the links.

{measured}, gloo.
"""


ORDER_HEADINGS = ("link", "MoEvement", "ETTR", "other", "ETTR", "ahead by", "surely", "available", "saving costs")


def _missing(jobs: Jobs) -> str:
    """Return a sentence that names the jobs without a result. The text is empty if all jobs have one."""
    if not jobs.missing:
        return ""
    return f"\n\n**Not measured yet**, {len(jobs.missing)} jobs: {'; '.join(jobs.missing)}."


def _schedules(jobs: Jobs) -> str:
    """Return words that say how many schedules of kills there are; empty for a single one."""
    return "" if jobs.schedules == 1 else f", in {jobs.schedules} schedules"


def _name(rate: float) -> str:
    return f"{rate:g} Mbit/s" if rate else "no limit"


def _overheads(jobs: Jobs) -> Iterator[Sequence[str]]:
    columns = [HEADER.index(name) for name in ("strategy", "interval", "an iteration", "overhead")]
    for rate, samples in jobs.samples.items():
        for row in rows_of([sample for sample in samples if sample.mtbf_s is None]):
            yield _name(rate), *(row[column] for column in columns)


def _within_cap(jobs: Jobs) -> str:
    """Return a sentence that names MoEvement's jobs whose overhead is above :data:`CAP`."""
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


def _prediction_errors(jobs: Jobs) -> str:
    """Return a sentence with the mean and largest differences of predicted from measured ETTRs."""
    sentences = []
    for schedule, is_killed in (("without kills", False), ("with kills", True)):
        errors = [
            abs(sample.predicted - ettr_of([sample], costs[sample.strategy]).mean)
            for samples in jobs.samples.values()
            for costs in [saving_costs(samples)]
            for sample in samples
            if sample.predicted is not None and sample.strategy in costs and (sample.mtbf_s is not None) is is_killed
        ]
        if errors:
            sentences.append(
                f"Predicted ETTRs of the {len(errors)} jobs {schedule} are off by {statistics.fmean(errors):.3f} on "
                f"average, and by {max(errors):.3f} at most."
            )
    return " ".join(sentences)


def _share(share: float, low: float | None, high: float | None) -> str:
    return f"{share:.1%}" + ("" if low is None or high is None else f" ({low:.1%} to {high:.1%})")


def _orders(jobs: Jobs) -> Iterator[Sequence[str]]:
    """Yield a row for each link and each system in :data:`EXACT`. A row compares the system with MoEvement's best."""
    for rate, samples in jobs.samples.items():
        costs, by_name, available = saving_costs(samples), dict[str, Ettr](), dict[str, float]()
        for name in dict.fromkeys(sample.strategy for sample in samples if sample.strategy != FREE):
            killed = [sample for sample in samples if sample.strategy == name and sample.mtbf_s is not None]
            if killed and name in costs:
                by_name[name] = ettr_of(killed, costs[name])
                available[name] = statistics.fmean(sample.available for sample in killed)
        own = {name: ettr for name, ettr in by_name.items() if name.startswith(OURS)}
        if not own:
            continue
        best = max(own, key=lambda name: own[name].mean)
        for name in EXACT:
            if name in by_name:
                ahead, both = own[best].mean - by_name[name].mean, own[best].half + by_name[name].half
                surely = "yes" if abs(ahead) > both else "no"
                costs_more = available[best] / own[best].mean - available[name] / by_name[name].mean
                yield (
                    _name(rate), best, str(own[best]), name, str(by_name[name]), f"{ahead:+.3f}", surely,
                    f"{available[best] - available[name]:+.3f}", f"{100 * costs_more:+.1f}",
                )  # fmt: skip
