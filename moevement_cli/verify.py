"""Command ``moevement verify``, which compares two runs bit for bit."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from moevement_core.errors import RunRecordError
from moevement_core.run.environment import environment_complaint
from moevement_core.run.run_record import RunRecord
from moevement_core.run.verify import compare
from moevement_core.util.words import counted


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the description and arguments of ``moevement verify``."""
    parser.description = (
        "Compare two finished runs: losses and gradient norms of every iteration, and the digests of the final "
        "states. The exit code is 0 only if the runs are equal."
    )
    parser.add_argument("run_a", metavar="RUN_A", type=Path)
    parser.add_argument("run_b", metavar="RUN_B", type=Path)
    parser.add_argument(
        "--common",
        action="store_true",
        help="compare only iterations that both runs recorded, because a resumed run has no early iterations",
    )
    parser.add_argument(
        "--fixed-environment",
        action="store_true",
        help="also require that both runs trained with --deterministic-mode, on equal processors, libraries and "
        "environment variables (docs/determinism.md)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Compare the runs, print the result, and return 0 if they are equal, else 1.

    With ``--fixed-environment``, the result is also 1 if their environments do not guarantee equal bits.
    """
    a, b = RunRecord(arguments.run_a), RunRecord(arguments.run_b)
    if a.folder.is_dir() and b.folder.is_dir() and a.folder.samefile(b.folder):
        raise RunRecordError(f"{a.folder} and {b.folder} are the same folder; give the --run-dir of two runs")
    verdict = compare(a, b, common_iterations=arguments.common)
    if verdict.equal:
        print(f"equal: {counted(verdict.iterations_compared, 'iteration')} and the final state, bit for bit")
    else:
        print(f"DIFFERENT: {verdict.first_difference}")
        differing = [part for part, same in verdict.parts.items() if not same]
        print(f"parts of the final state that differ: {', '.join(differing) or 'none'}")
    for text in verdict.lost_updates:
        print(f"not exact, because of the strategy: {text}")
    complaint = environment_complaint(a, b) if arguments.fixed_environment else None
    if complaint is not None:
        print(f"the environment is not fixed: {complaint}")
    if arguments.json:
        print(json.dumps(verdict.as_dict()))
    return 0 if verdict.equal and complaint is None else 1
