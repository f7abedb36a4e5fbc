"""Checks on GPUs of statements in the documentation: twenty checks of one device, ten of several devices.

python -m benchmarks.gpu

Each check runs in its own process with its own time limit, so a check that crashes or hangs harms no other. The command
writes a JSON file for each check into one folder (--out). It skips a check that has a result, so an interrupted call
can continue. After each check it also writes the page gpu.md, and gpu.json with all results. Without a GPU it rehearses
the parts that a CPU can run.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO

from benchmarks.gpu.catalogue import CHECKS
from benchmarks.gpu.check import Check, Status, write_whole
from benchmarks.gpu.machine import describe
from benchmarks.gpu.page import page
from benchmarks.gpu.processes import ROOT, call
from benchmarks.gpu.runner import Result, duration, result_of, run

OUT = ROOT / "runs" / "gpu"
PAGE, ALL, LOCK = "gpu.md", "gpu.json", ".lock"
USAGE_ERROR = 2
DESCRIBE_S = 120
"""Seconds that the description of the hardware may take."""


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        print(f"{self.prog}: {message}; --help says more", file=sys.stderr)
        raise SystemExit(USAGE_ERROR)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the chosen checks, and return the exit code.

    The code is 1 if a check of this call failed, crashed or timed out, 2 for bad input, else 0.
    """
    parser = _OneLineParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="list the checks and run none")
    parser.add_argument(
        "--only", nargs="+", metavar="CHECK", help="names or numbers, such as E1; E: all of one device, M: all others"
    )
    parser.add_argument("--again", action="store_true", help="also run checks that already have a result")
    parser.add_argument("--limit", type=float, metavar="S", help="seconds per check (default: each check has a limit)")
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR", help="folder of results (default: runs/gpu)")
    arguments = parser.parse_args(argv)
    checks = _chosen(arguments.only, parser)
    if arguments.limit is not None and not (0 < arguments.limit < math.inf):
        parser.error(f"--limit {arguments.limit:g}: needs seconds above 0")
    if arguments.list:
        for check in checks:
            print(f"{check.number:4} {check.name:18} {duration(check.limit_s):>6} {check.devices} GPU  {check.claim}")
        return 0
    with _locked_folder(arguments.out, parser):
        return _run(checks, arguments)


def _run(checks: Sequence[Check], arguments: argparse.Namespace) -> int:
    machine = call(describe, DESCRIBE_S)
    if machine["devices"] == "0":
        print("benchmarks.gpu: no GPU here; this is a rehearsal, which settles nothing", file=sys.stderr)
    is_good = True
    _write(arguments.out, machine)
    for result in run(checks, arguments.out, machine, again=arguments.again, limit_s=arguments.limit):
        is_good &= result.status not in (Status.FAILED, Status.CRASHED, Status.TIMED_OUT)
        why = result.why.splitlines()[-1] if result.why else ""
        print(f"{result.number:4} {result.name:18} {duration(result.took_s):>6}  {result.status}  {why}", flush=True)
        _write(arguments.out, machine)
    print(f"benchmarks.gpu: results are in {arguments.out / PAGE} and {arguments.out / ALL}", file=sys.stderr)
    return 0 if is_good else 1


def _chosen(words: Sequence[str] | None, parser: argparse.ArgumentParser) -> list[Check]:
    if words is None:
        return list(CHECKS)
    chosen = set()
    for word in words:
        matches = {check.name for check in CHECKS if word in (check.name, check.number, check.number[0])}
        if not matches:
            parser.error(f"--only {word}: no check has this name or number; --list shows them")
        chosen |= matches
    return [check for check in CHECKS if check.name in chosen]


def _locked_folder(out: Path, parser: argparse.ArgumentParser) -> IO[str]:
    """Lock the result folder, and return the open lock file. Create the folder if it is missing.

    The lock prevents two calls from overwriting each other's results.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / LOCK).open("w")
    except OSError as error:
        parser.error(f"--out {out}: {error.strerror}; give a folder that can be written")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        parser.error(f"--out {out}: another call is writing there; wait for it or give another folder")
    return lock


def _write(out: Path, machine: dict[str, str]) -> None:
    results: dict[str, Result] = {
        check.name: result for check in CHECKS if (result := result_of(out, check)) is not None
    }
    command = shlex.join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]])
    write_whole(out / ALL, json.dumps({name: asdict(result) for name, result in results.items()}, indent=1) + "\n")
    write_whole(out / PAGE, page(CHECKS, results, machine, command))


if __name__ == "__main__":
    sys.exit(main())
