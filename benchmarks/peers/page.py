"""Page and figure of the benchmark, made from one record of :mod:`benchmarks.peers`."""

from __future__ import annotations

import ast
import difflib
import io
import statistics
import tokenize
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.papers.common import table
from benchmarks.peers.job import RANKS, SIZES, Model
from benchmarks.peers.systems import HERE, LOOPS, PLAIN, SYSTEMS, System, by_name

PAGE, FIGURE = HERE.with_suffix(".md"), HERE.with_suffix(".png")
RECORDS = HERE.with_suffix(".jsonl")
"""Results: a line for each run of the benchmark. The page has the newest run."""
OURS = "this project"
"""Prefix of the names of this project's rows."""
HEADER = (
    "system", "an iteration, over *none*", "processor time of it, over *none*", "s from kill to next commit",
    "s until all ranks train", "iterations repeated", "bits", "MB of a rank", "MB of the job", "lines",
)  # fmt: skip
MEASURES = (
    ("the time of an iteration", "{:.2f} times *none*", lambda row: row.wall),
    ("the processor time of an iteration", "{:.2f} times *none*", lambda row: row.processor),
    ("the time from a kill to the next commit", "{:.2f} s", lambda row: row.next_s),
    ("the time until all ranks train again", "{:.2f} s", lambda row: row.all_s),
    ("the memory of a rank", "{:.0f} MB", lambda row: row.rank_mb),
    ("the memory of the job", "{:.0f} MB", lambda row: row.job_mb),
    ("the lines that a user writes", "{:.0f}", lambda row: row.lines),
)
"""Measures by which the page compares, each with its format and the function that takes it from a row. Less is better."""


class Row:
    """Figures of one system, as the page shows them.

    Args:
        system: the system.
        result: the system's part of the record.
        plain: the part of the job without fault tolerance.
    """

    def __init__(self, system: System, result: Mapping[str, Any], plain: Mapping[str, Any]) -> None:
        pairs = list(zip(result["rounds"], plain["rounds"], strict=False))
        self.system, self.error = system, result["error"]
        self.walls = [job["iteration_s"] / other["iteration_s"] for job, other in pairs]
        self.processors = [job["iteration_cpu_s"] / other["iteration_cpu_s"] for job, other in pairs]
        self.wall, self.processor = _median(self.walls), _median(self.processors)
        self.rank_mb = _median(job["rank_bytes"] / 1e6 for job, _ in pairs)
        self.job_mb = _median(job["job_bytes"] / 1e6 for job, _ in pairs)
        killed = result["kills"]
        self.kills = killed["kills"] if killed else []
        self.next_s, self.all_s = (_median(kill[name] for kill in self.kills) for name in ("next_s", "all_s"))
        free = {job["digest"] for job, _ in pairs}
        self.bits = "" if killed is None else "equal" if free == {killed["digest"]} else "different"
        if system.longer > 1 and killed is not None:
            self.bits = "not comparable"
        self.phases = killed["phases"] if killed else []
        self.lines = float(lines_of(LOOPS / system.loop))

    def cells(self) -> list[str]:
        """Return the row of the table."""
        if not self.walls:
            return [self.system.name, f"did not run: {self.error}", *[""] * 7, f"{self.lines:.0f}"]
        repeated = sum(kill["repeated"] for kill in self.kills)
        return [
            self.system.name, _spread(self.walls), _spread(self.processors),
            *(_spread([kill[name] for kill in self.kills]) for name in ("next_s", "all_s")),
            f"{repeated} in {len(self.kills)} kills" if self.kills else ("did not recover" if self.error else ""), self.bits,
            f"{self.rank_mb:.0f}", f"{self.job_mb:.0f}", "" if self.system.name == PLAIN else f"{self.lines:.0f}",
        ]  # fmt: skip


def rows_of(record: Mapping[str, Any]) -> list[Row]:
    """Return the rows of all systems in a record."""
    results = record["systems"]
    return [Row(system, results[system.name], results[PLAIN]) for system in SYSTEMS if system.name in results]


def _median(values: Iterable[float]) -> float:
    return statistics.median(listed) if (listed := list(values)) else float("nan")


def _spread(values: Sequence[float]) -> str:
    if not values:
        return ""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def code_lines(path: Path) -> list[str]:
    """Return the lines of a Python file without comments, docstrings and empty lines."""
    text = path.read_text(encoding="utf-8")
    left_out = set[int]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            left_out |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    with_code = {
        number
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.string.strip() and token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER)
        for number in range(token.start[0], token.end[0] + 1)
    }
    return [line for number, line in enumerate(text.splitlines(), start=1) if number in with_code - left_out]


def lines_of(loop: Path) -> int:
    """Return the number of lines of code in a loop that the plain loop lacks. Their indentation does not count."""
    plain, lines = ([line.strip() for line in code_lines(path)] for path in (LOOPS / by_name()[PLAIN].loop, loop))
    return sum(line.startswith("+ ") for line in difflib.ndiff(plain, lines))


def comparison(rows: Sequence[Row]) -> list[str]:
    """Return a line for each measure: which systems are better than the best row of this project."""
    own = [row for row in rows if row.system.name.startswith(OURS)]
    others = [row for row in rows if row not in own and row.system.name != PLAIN]
    lines = []
    for name, form, value in MEASURES:
        measured = [row for row in own if value(row) == value(row)]  # NaN is not equal to itself.
        if not measured:
            continue
        best = min(measured, key=value)
        ahead = sorted((row for row in others if value(row) < value(best)), key=value)
        text = "; ".join(f"*{row.system.name}* has {form.format(value(row))}" for row in ahead)
        verdict = f"**behind**: {text}" if ahead else "no measured system is better"
        lines.append(f"- In {name}: {verdict}. This project: {form.format(value(best))} (*{best.system.name}*).")
    return lines


def _phases(rows: Sequence[Row]) -> str:
    """Return a table with the parts of this project's recoveries, by its own record."""
    listed = [(row.system.name, row.phases) for row in rows if row.phases]
    if not listed:
        return ""
    names = list(listed[0][1][0])
    cells = [[name, *(f"{_median(each[part] for each in phases):.2f}" for part in names)] for name, phases in listed]
    return f"""
Where this project's seconds go, by its own record (medians; the rest until the next commit is the iteration itself):

{table(("", *names), cells)}
"""


def report(record: Mapping[str, Any]) -> str:
    """Return the text of the page."""
    rows = rows_of(record)
    size = SIZES[record["size"]]
    weights = sum(parameter.numel() for parameter in Model(size).parameters())
    rounds = len(record["systems"][PLAIN]["rounds"])
    peers = ", ".join(f"{name} {version}" for name, version in record["peers"].items())
    sentences = "\n".join(f"- *{row.system.name}*: {row.system.after_kill}" for row in rows)
    comparisons = "\n".join(comparison(rows))
    later = f"\n- Some jobs ran later than the others: {', '.join(record['later'])}." if record["later"] else ""
    return f"""# Beside other systems, on the same job

    benchmarks/peers/setup.sh
    {record["command"]}        (writes this file)

{RANKS} gloo ranks on one machine train a small MoE ({size.layers} layers of {size.experts} experts, {weights / 1e6:.1f} M parameters, {12 * weights / 1e6:.1f} MB with AdamW),
data parallel: each rank holds the whole state. Model, data, optimizer, seeds and threads (one for each rank) are those of
`benchmarks/peers/job.py` for all systems. What a user writes for each is in `benchmarks/peers/loops`.
All processes share two cores, so a spare process or a checkpoint that waits for a disk costs little here, and processor time is what
counts.

{table(HEADER, [row.cells() for row in rows])}

- *over none*: ratio to the job without fault tolerance in the same round; median and range of {rounds} rounds of {record["iterations"]} iterations.
  Other programs ran on the machine, so ratios of wall time scatter; ratios of processor time, of all processes of a job, scatter less.
- *kill*: SIGKILL to one of the ranks 1 to 3, shortly after all ranks have committed an iteration; median and range. Rank 0 is spared, because
  nvidia-resiliency-ext cannot lose it in-process. Both times are taken outside of the job.
- *next commit*: any rank has committed a later iteration than before. *all ranks train*: all {RANKS} ranks have committed the same one.
- *bits*: the final weights, compared with those of the same system's jobs without a failure. *not comparable*: survivors go on with a
  smaller batch, so the weights cannot be the same; this job has more iterations, so that the lost rank comes back in it.
- *MB*: proportional set size. A rank's helper processes are included; in *of the job*, so are launchers and spares.
- *lines*: lines of code in the loop that the loop without fault tolerance lacks, without the command that starts it.

![Left: seconds from a kill to the next commit, and until all ranks train. Right: processor time of an iteration over the job without fault tolerance]({FIGURE.name})

## What the seconds are

{sentences}
{_phases(rows)}
## Where this project is behind, and where not

The best row of this project against every other system, from the table above:

{comparisons}

## How to read this

- One small job on one machine. Nothing ran on a GPU or over a network; the state is a few MB. With more state, systems that
  save the whole state in each iteration pay more.
- Data parallelism is the case in which other ranks hold everything that is lost. Pipeline or expert parallelism, for which this project
  is made, is not measured here: torchft and the checkpoints treat it differently.
- *this project, replay* and *redo* save by this project's defaults: once the job has measured what windows cost, it makes one in a few dozen
  iterations. The first windows, up to about iteration 16, follow each other without a rest, so a short job shows a higher cost than a long one. *whole state each iteration* is the row to compare with checkpoints of each iteration.
- Systems that restart a process pay for its imports, which are slow on two shared cores.{later}

{record["measured_on"]}, gloo. Other systems: {peers or "not installed"}.
"""


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Draw the seconds after a kill, and the processor time of an iteration, of each system."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows_of(record) if row.walls and row.system.name != PLAIN][::-1]
    names, places = [row.system.name for row in rows], range(len(rows))
    colours = ["tab:blue" if name.startswith(OURS) else "tab:grey" for name in names]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 0.6 * len(rows) + 1.4), sharey=True)
    left.barh(places, [row.all_s for row in rows], color=colours, alpha=0.4, label="until all ranks train")
    left.barh(places, [row.next_s for row in rows], color=colours, height=0.5, label="until the next commit")
    for place, row in zip(places, rows, strict=True):
        values = [kill["all_s"] for kill in row.kills]
        left.plot(values, [place] * len(values), "k.", markersize=4)
        right.plot(row.processors, [place] * len(row.processors), "k.", markersize=4)
    left.set_yticks(list(places), names)
    left.set_xlabel("seconds from SIGKILL: until the next commit (dark), until all ranks train (light)", fontsize=8)
    right.barh(places, [row.processor for row in rows], color=colours)
    right.axvline(1.0, color="black", linewidth=0.8)
    right.set_xlabel("processor time of an iteration, over the job without fault tolerance", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
