"""``moevement report``: what runs came to, as a table, as a plot and as a page."""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from moevement_cli.html_report import write_page
from moevement_cli.outputs import check_output
from moevement_cli.plotting import SUFFIXES, figure
from moevement_cli.run_folders import expanded
from moevement_core.errors import ConfigError, RunRecordError
from moevement_core.events import Resized
from moevement_core.recovery.account import trace_events
from moevement_core.recovery.outcome import Recovery
from moevement_core.run_record import RunRecord
from moevement_core.snapshot.cost import cost_line


def add_to(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="run directories")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw loss and gradient norm (.png, .svg or .pdf)")
    parser.add_argument(
        "--trace", metavar="FILE", type=Path, help="write failures and recoveries as a timeline for ui.perfetto.dev"
    )
    parser.add_argument(
        "--html",
        metavar="FILE",
        type=Path,
        help="write one page that needs nothing else: loss, times, recoveries by part, memory, traffic, plan against "
        "measured",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand; returns the exit code."""
    return report(arguments.runs, arguments.plot, arguments.trace, arguments.html, as_json=arguments.json)


def report(runs: list[Path], plot: Path | None, trace: Path | None, html: Path | None, *, as_json: bool) -> int:
    """Print a table of ``runs``, draw them to ``plot``, and so on, if given; returns the exit code."""
    check_output("--plot", plot, SUFFIXES)
    check_output("--trace", trace)
    check_output("--html", html)
    runs = list(expanded(runs))
    rows = [_row(RunRecord(folder)) for folder in runs]
    table = Table("run", "iterations", "loss", "validation", "test", "tokens/s", "state digest")
    for row in rows:
        table.add_row(
            row["run"], str(row["iterations"]), _short(row["final_loss"]), _short(row["validation_loss"]),
            _short(row["test_loss"]), f"{row['tokens_per_s']:,.0f}", (row["state_digest"] or "unfinished")[:16],
        )  # fmt: skip
    Console().print(table)
    for row in rows:
        if row["checkpointing"]:
            print(f"{row['run']}: {cost_line(row['checkpointing'])}")
            for recovery in row["checkpointing"]["recoveries"]:
                known = {field.name: recovery[field.name] for field in fields(Recovery)}
                print(f"{row['run']}: {Recovery(**known).sentence()}")
        for change in row["sizes"]:
            print(f"{row['run']}: {change}")
    if plot is not None:
        draw([RunRecord(folder) for folder in runs], plot)
        print(f"plot: {plot}")
    if trace is not None:
        write_trace([RunRecord(folder) for folder in runs], trace)
        print(f"trace: {trace} (open it in ui.perfetto.dev)")
    if html is not None:
        write_page([RunRecord(folder) for folder in runs], html)
        print(f"page: {html}")
    if as_json:
        print(json.dumps({"runs": rows}))
    return 0


def write_trace(records: list[RunRecord], path: Path) -> None:
    """Failures and recoveries of runs, one process of the trace each."""
    timeline: dict[str, Any] = {"traceEvents": [], "displayTimeUnit": "ms"}
    for number, record in enumerate(records):
        events = trace_events(record.events())["traceEvents"]
        timeline["traceEvents"] += [{**event, "pid": number} for event in events]
        name = {"name": record.folder.name}
        timeline["traceEvents"].append({"name": "process_name", "ph": "M", "pid": number, "args": name})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(timeline), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--trace {path}: {error.strerror}; give a file that can be written") from None


def _row(record: RunRecord) -> dict[str, Any]:
    metrics = record.metrics()
    if not metrics:
        raise RunRecordError(f"{record.folder}: no metrics; give the --run-dir of a run that has begun to train")
    summary = record.summary() if record.summary_path.exists() else {}
    # The first iteration warms caches and pools, so it says nothing of the others.
    rates = [line["tokens_per_s"] for line in metrics[1:] or metrics if line.get("tokens_per_s")]
    return {
        "run": str(record.folder),
        "iterations": metrics[-1]["iteration"],
        "final_loss": metrics[-1].get("loss"),
        "validation_loss": summary.get("validation_loss"),
        "test_loss": summary.get("test_loss"),
        "tokens_per_s": statistics.median(rates) if rates else 0.0,
        "checkpointing": summary.get("checkpointing"),
        "state_digest": summary.get("state_digest", {}).get("all"),
        "sizes": [
            Resized(**{field.name: event[field.name] for field in fields(Resized)}).sentence()
            for event in record.events()
            if event["event"] == Resized.kind
        ],
    }


def _short(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else "-" if value is None else str(value)


def draw(records: list[RunRecord], path: Path) -> None:
    """Loss and gradient norm over iterations, one line a run."""
    with figure(path, 2, (10, 3.5)) as axes:
        for axis, name, title in ((axes[0], "loss", "training loss"), (axes[1], "grad_norm", "gradient norm")):
            for record in records:
                points = [(m["iteration"], m[name]) for m in record.metrics() if isinstance(m.get(name), float)]
                axis.plot([x for x, _ in points], [y for _, y in points], linewidth=1, label=record.folder.name)
            axis.set(xlabel="iteration", title=title)
            axis.grid(alpha=0.3)
        axes[0].legend()
