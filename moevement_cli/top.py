"""Command ``moevement top``, which shows in the terminal what a run does now."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from moevement_cli.frame import Frame, nodes_of
from moevement_cli.keys import Keys
from moevement_cli.run_folders import is_run, which_run
from moevement_cli.run_state import state_of
from moevement_core.errors import ConfigError, RunRecordError
from moevement_core.monitoring.watched_run import WatchedRun

QUIT = "q"
HINT = "q: quit    what the words mean: docs/looking.md"


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the description and arguments of ``moevement top``."""
    parser.description = (
        "Show ranks, progress, checkpoints, host memory and recoveries of a run, read from its run directory. The "
        "display ends when the run ends, or when you press q or Ctrl-C. The run may be on another host, or may have "
        "ended."
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="run directory (--run-dir of the run)")
    parser.add_argument("--once", action="store_true", help="print one frame and exit (default without a terminal)")
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between updates (default: 1)")
    parser.add_argument("--json", action="store_true", help="print one frame as one JSON object, as the last line")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show the run until it ends or the user quits, print the last frame, and return the exit code."""
    if not arguments.interval > 0:
        raise ConfigError(f"--interval {arguments.interval:g}; needs more than 0 seconds")
    watched, console = WatchedRun(_checked(arguments.run_dir)), Console()
    watched.update()
    if not (arguments.once or arguments.json) and console.is_terminal and not watched.has_ended:
        _watch(watched, console, arguments.interval)
    console.print(Frame(watched, time.time()))
    if arguments.json:
        print(json.dumps(_as_json(watched)))
    return 0


def _watch(watched: WatchedRun, console: Console, interval_s: float) -> None:
    """Show frames until the run ends, the user presses the key to quit, or the terminal closes."""
    try:
        with Keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
            while not watched.has_ended and console.is_terminal:
                live.update(Frame(watched, time.time(), HINT), refresh=True)
                if keys.wait(interval_s) == QUIT:
                    break
                watched.update()
    except KeyboardInterrupt:
        pass


def _checked(folder: Path) -> Path:
    """Return ``folder`` if it is a run directory.

    Raises:
        RunRecordError: the folder is no run directory.
    """
    if not folder.is_dir():
        raise RunRecordError(f"{folder}: no such run directory; give the --run-dir of a run")
    if not is_run(folder):
        raise RunRecordError(f"{folder}: no run was recorded here; {which_run(folder)}")
    return folder


def _as_json(watched: WatchedRun) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for sample in watched.samples():
        if sample.label is None:
            figures[sample.figure.exported_name] = sample.value
        else:
            figures.setdefault(sample.figure.exported_name, {})[sample.label] = sample.value
    state = state_of(watched, time.time())
    return {
        "run": str(watched.record.folder),
        "state": state.kind,
        "state_text": state.text,
        "job": None if watched.job is None else asdict(watched.job),
        "figures": figures,
        "nodes": [
            {"node": node.name, "ranks": node.ranks, "spares": node.spares, "starting": node.starting}
            for node in nodes_of(watched)
        ],
        "recoveries": watched.figures.recoveries,
    }
