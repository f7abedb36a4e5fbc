"""Command ``moevement report``, which summarizes runs as a table, a plot, a page and a timeline."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import fields
from itertools import batched
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from moevement_cli.html_report import write_page
from moevement_cli.outputs import check_output
from moevement_cli.plotting import SUFFIXES
from moevement_cli.run_facts import DIGEST_LENGTH, UNKNOWN, RunFacts, headline, read
from moevement_cli.run_folders import expanded
from moevement_cli.run_plot import draw
from moevement_cli.saving_costs import NAMES, SavingCosts, parts_text, percent
from moevement_core.errors import ConfigError
from moevement_core.run.account import Account, trace_events
from moevement_core.run.cost_line import cost_line
from moevement_core.run.run_record import RunRecord


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the description and arguments of ``moevement report``."""
    parser.description = (
        "Summarize runs that have ended or still train. The report says whether the runs are equal and what failures "
        "and saving cost, and gives loss, speed and final state. The command prints a table. Options add a plot, a "
        "page or a timeline. A folder of run directories stands for the runs in it."
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="run directories, or a folder of them")
    parser.add_argument(
        "--plot",
        metavar="FILE",
        type=Path,
        help="draw loss, progress over time, and the overhead of saving (.png, .svg or .pdf)",
    )
    parser.add_argument(
        "--trace", metavar="FILE", type=Path, help="write failures and recoveries as a timeline for ui.perfetto.dev"
    )
    parser.add_argument(
        "--html",
        metavar="FILE",
        type=Path,
        help="write a page in one file: loss, times, recoveries and overhead of saving by part, memory, traffic, "
        "planned and measured costs",
    )
    parser.add_argument("--verbose", action="store_true", help="print all recorded facts of each recovery")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the report, write the files that the user wants, and return the exit code."""
    check_output("--plot", arguments.plot, SUFFIXES)
    check_output("--trace", arguments.trace)
    check_output("--html", arguments.html)
    runs = read(list(expanded(arguments.runs)))
    _print(runs, Console(), is_verbose=arguments.verbose)
    if arguments.plot is not None:
        draw(runs, arguments.plot)
        print(f"plot: {arguments.plot}")
    if arguments.trace is not None:
        write_trace([run.record for run in runs], arguments.trace)
        print(f"trace: {arguments.trace} (open it in ui.perfetto.dev)")
    if arguments.html is not None:
        write_page(runs, arguments.html)
        print(f"page: {arguments.html}")
    if arguments.json:
        print(json.dumps({"headline": headline(runs), "runs": [_as_json(run) for run in runs]}))
    return 0


def _print(runs: Sequence[RunFacts], console: Console, *, is_verbose: bool) -> None:
    console.print(headline(runs), style="bold", markup=False, highlight=False, soft_wrap=True)
    has_parts = any(run.saving_costs.newest is not None for run in runs)
    columns = [_column(run, runs[0], has_parts=has_parts) for run in runs]
    widest = max(max(map(len, column.values())) for column in columns)
    side_by_side = max(1, (console.width - max(map(len, columns[0]))) // (widest + 2))
    for some in batched(columns, side_by_side):
        console.print(_table(some))
    for run in runs:
        if checkpointing := run.summary.get("checkpointing"):
            print(f"{run.name}: {cost_line(checkpointing)}")
        if remark := _remark(run.saving_costs, run.lines[-1]["iteration"]):
            print(f"{run.name}: {remark}")
        for event in run.recoveries if is_verbose else ():
            known = {field.name: event[field.name] for field in fields(Account) if field.name in event}
            print("\n".join(f"{run.name}: {line}" for line in Account(**known).lines(is_verbose=True)))
        for text in run.resizes:
            print(f"{run.name}: {text}")


def _table(columns: Sequence[dict[str, str]]) -> Table:
    """Return a table. The first column has the names of the facts, and each run has a column."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    for _ in columns:
        table.add_column(overflow="fold")
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns), style="bold" if name == "run" else "")
    return table


def _column(run: RunFacts, first: RunFacts, *, has_parts: bool) -> dict[str, str]:
    """Return the column of a run: the text of each fact, by the name of the fact."""
    digest = run.digest
    is_same = run is not first and digest is not None and digest == first.digest
    effective = run.figures.effective
    return {
        "run": run.name,
        "state": run.state,
        "iterations": str(run.lines[-1]["iteration"]),
        "loss": _short(run.lines[-1].get("loss")),
        "validation loss": _short(run.summary.get("validation_loss")),
        "iteration time": _form(run.iteration_s, "{:.3f} s"),
        "tokens/s": _form(run.tokens_per_s, "{:,.0f}"),
        "saving costs": run.saving_costs.text(),
        **(_parts(run) if has_parts else {}),
        "ETTR": _form(effective, "{:.1%}"),
        "recoveries": _recoveries(run),
        "state digest": "the same" if is_same else (digest or "unfinished")[:DIGEST_LENGTH],
    }


def _parts(run: RunFacts) -> dict[str, str]:
    """Return the allowed overhead, and the percentage of each part of overhead, by indented name."""
    overhead = run.saving_costs.newest
    shown = {} if overhead is None else dict(parts_text(overhead))
    if overhead is not None and overhead.allowed is not None:
        shown["allowed"] = percent(overhead.allowed)
    return {f"  {name}": shown.get(name, UNKNOWN) for name in ("allowed", *NAMES.values())}


def _recoveries(run: RunFacts) -> str:
    return f"{len(run.recoveries)} ({run.lost_s:.1f} s, {run.replayed} repeated)" if run.recoveries else "0"


def _remark(costs: SavingCosts, last: int) -> str:
    """Return a remark if no cost of saving was measured at iteration ``last``; an empty text if one was."""
    if costs.newest is None:
        return f"saving costs not measured: {costs.reason_text}"
    return "" if costs.newest_at == last else f"saving costs as of iteration {costs.newest_at}"


def write_trace(records: Sequence[RunRecord], path: Path) -> None:
    """Write a timeline of the failures and recoveries of runs. Perfetto shows each run as a process."""
    timeline: dict[str, Any] = {"traceEvents": [], "displayTimeUnit": "ms"}
    for number, record in enumerate(records):
        events = trace_events(record.events())["traceEvents"]
        timeline["traceEvents"] += [{**event, "pid": number} for event in events]
        name = {"name": record.folder.resolve().name}
        timeline["traceEvents"].append({"name": "process_name", "ph": "M", "pid": number, "args": name})
    try:
        path.write_text(json.dumps(timeline), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--trace {path}: {error.strerror}; give a file that can be written") from None


def _as_json(run: RunFacts) -> dict[str, Any]:
    return {
        "run": str(run.record.folder),
        "state": run.state,
        "iterations": run.lines[-1]["iteration"],
        "final_loss": run.lines[-1].get("loss"),
        "validation_loss": run.summary.get("validation_loss"),
        "test_loss": run.summary.get("test_loss"),
        "iteration_s": run.iteration_s,
        "tokens_per_s": run.tokens_per_s or 0.0,
        "overhead": run.saving_costs.as_json(),
        "overhead_missing": run.saving_costs.reason,
        "effective": run.figures.effective,
        "recoveries": len(run.recoveries),
        "lost_s": run.lost_s,
        "replayed": run.replayed,
        "checkpointing": run.summary.get("checkpointing"),
        "state_digest": run.digest,
        "sizes": run.resizes,
        "origin": dict(run.origin()),
    }


def _short(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else UNKNOWN if value is None else str(value)


def _form(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else form.format(value)
