"""Command ``moevement drill``, which flips bits in a job's data, and reports which check finds each flip.

The drill runs one job for each kind of data, with a failure that makes the job need the damaged data. Another job runs
without flips and failures. Its final state is the reference for all others.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from moevement_cli.examples import EXAMPLES
from moevement_core import log
from moevement_core.errors import ConfigError
from moevement_core.recovery.flips import PREFIX
from moevement_core.restart.faults import FlipKind
from moevement_core.run.run_record import RunRecord
from moevement_core.util.damage import Damage

ALL = "all"
AFTER = 6
"""Iterations that the default job trains after the failure."""
PRESET = [
    str(EXAMPLES / "pretrain_moe" / "pretrain_gpt.py"), "--config",
    str(EXAMPLES / "pretrain_moe" / "configs" / "laptop.yaml"), "--hidden-size", "64", "--ffn-hidden-size", "64",
    "--moe-ffn-hidden-size", "64", "--seq-length", "64", "--max-position-embeddings", "64", "--eval-iters", "0",
    "--lr-decay-iters", "1000",
]  # fmt: skip
"""Default job: the laptop preset with smaller layers, about a quarter of its size."""
SENT = (FlipKind.WIRE, FlipKind.HEADERS, FlipKind.MESSAGES)
"""Kinds of data in which a rank flips a bit while it sends the data, before the failure."""
LOOK_S = 0.02
LEAD = 5
"""Iterations from the first flip of :data:`SENT` data to the failure, so that even slow peers have the data by then."""


@dataclass(frozen=True)
class DrillResult:
    """Result of the drill for one kind of data."""

    kind: str
    flipped: dict[str, Any] | None
    """Flipped bit: the fields of a :class:`~moevement_core.recovery.flips.FlipPlace`, and the time of the flip.

    None: the job used no data of this kind.
    """
    damage: Damage | None
    """Detected damage. None: no rank detected it."""
    rank: int | None
    """Rank that detected the damage."""
    after_s: float | None
    """Seconds from the flip to its detection."""
    is_equal: bool
    """True if the final state is the same as in the undamaged run."""
    ended_by: str | None
    """Reason why the job ended before it had a final state."""

    @property
    def is_right(self) -> bool:
        """True if a rank detected the damage and the job did not train on with damaged data."""
        return self.flipped is not None and self.damage is not None and (self.is_equal or bool(self.ended_by))

    @property
    def outcome(self) -> str:
        """Outcome of the job, in words."""
        if self.ended_by is not None:
            return f"the job ended: {self.ended_by}"
        return "as undamaged" if self.is_equal else "ANOTHER FINAL STATE"


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the description and arguments of ``moevement drill``."""
    parser.description = (
        "Flip a bit in data of a running job on this host, and kill ranks so that the job needs the data. Report which "
        "check found the damage, how soon, and what the job did instead of using the data. One job runs for each kind "
        "of data. The exit code is 0 only if all damage was found, and every job reached the final state of an "
        "undamaged job or ended with a reason."
    )
    parser.add_argument(
        "--flip", nargs="+", choices=[*(kind.value for kind in FlipKind), ALL], default=[ALL], metavar="KIND",
        help=f"kinds of data to damage: {', '.join(FlipKind)}, or all (default: all)",
    )  # fmt: skip
    parser.add_argument("--at", type=int, default=10, metavar="N", help="iteration of the failure (default: 10)")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed that selects the tensor and the bit (default: 0)"
    )
    parser.add_argument("--nproc", type=int, default=4, metavar="N", help="number of ranks (default: 4)")
    parser.add_argument("--kill", type=int, default=1, metavar="RANK", help="rank that is killed (default: 1)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder in which the jobs' run directories are kept")
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="seconds that a job may take (default: 600)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument(
        "job", nargs=argparse.REMAINDER, metavar="-- SCRIPT ARGS",
        help="a training script and its flags (default: the laptop preset at a quarter of its size)",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the drill and return its exit code."""
    if not 0 <= arguments.kill < arguments.nproc or arguments.at <= LEAD or arguments.seed < 0:
        raise ConfigError(
            f"--kill {arguments.kill} --nproc {arguments.nproc} --at {arguments.at} --seed {arguments.seed}: --kill "
            f"must be below --nproc, --at above {LEAD}, and --seed 0 or more"
        )
    out = arguments.out or Path(tempfile.mkdtemp(prefix="moevement-drill-"))
    if out.is_dir() and any(out.iterdir()):
        raise ConfigError(f"--out {out}: not empty; give a folder for this drill alone")
    try:
        return _drill(arguments, out.absolute())
    finally:
        if arguments.out is None:
            shutil.rmtree(out, ignore_errors=True)


def _drill(arguments: argparse.Namespace, out: Path) -> int:
    kinds = list(FlipKind) if ALL in arguments.flip else [FlipKind(kind) for kind in dict.fromkeys(arguments.flip)]
    words = _job(arguments)
    undamaged = RunRecord(out / "undamaged")
    print(f"a run without damage (0 of {len(kinds)} kinds) ...", flush=True)
    code = _launch(arguments, words, [], undamaged.folder)
    if code:
        raise ConfigError(f"the job fails without any damage ({_reason(undamaged.folder, code)}); repair that first")
    wanted = str(undamaged.summary()["state_digest"]["all"])
    results = []
    for number, kind in enumerate(kinds, start=1):
        print(f"{kind} ({number} of {len(kinds)}) ...", flush=True)
        run_dir = out / kind
        end_at = arguments.at if kind is FlipKind.WINDOWS else None
        code = _launch(
            arguments,
            words=[*words, *_faults(arguments, kind, out)],
            options=["--spares", "2"],
            run_dir=run_dir,
            end_at=end_at,
        )
        results.append(_found(kind, run_dir, code, wanted))
    _print(results, Console())
    missed = [result.kind for result in results if not result.is_right]
    print(
        f"{len(results) - len(missed)} of {len(results)} found" + (f"; NOT RIGHT: {', '.join(missed)}" * bool(missed))
    )
    if arguments.json:
        drills = [{**asdict(result), "is_right": result.is_right} for result in results]
        print(json.dumps({"seed": arguments.seed, "at": arguments.at, "drills": drills}))
    return 1 if missed else 0


def _job(arguments: argparse.Namespace) -> list[str]:
    job = arguments.job[1:] if arguments.job[:1] == ["--"] else arguments.job
    words = job or [*PRESET, "--train-iters", str(arguments.at + AFTER)]
    return words if "--moevement-sparse-ckpt" in words else [*words, "--moevement-sparse-ckpt"]


def _faults(arguments: argparse.Namespace, kind: FlipKind, out: Path) -> list[str]:
    """Return a job's flags for the flip and the failure after it, and for the way of saving that ``kind`` needs."""
    first = arguments.at - LEAD if kind in SENT else 0
    where = f",rank={arguments.kill}" if kind in SENT else ""
    words = ["--moevement-inject-flip", f"kind={kind},iteration={first},seed={arguments.seed}{where}"]
    words += ["--moevement-recovery", "redo" if kind is FlipKind.GRADIENTS else "replay"]
    if kind is not FlipKind.WINDOWS:  # for windows, the drill itself kills all ranks at once
        words += ["--moevement-inject", f"rank={arguments.kill},iteration={arguments.at},phase=forward"]
    if kind is FlipKind.OWN:
        words += ["--moevement-keep-own", "always"]
    if kind is FlipKind.PARITY:
        words += ["--moevement-protection", f"parity:{arguments.nproc - 1}+1"]
    if kind in (FlipKind.PARITY, FlipKind.WINDOWS):
        words += ["--moevement-persist-dir", str(out / f"{kind}.windows")]
    return words


def _launch(
    arguments: argparse.Namespace,
    words: Sequence[str],
    options: Sequence[str],
    run_dir: Path,
    end_at: int | None = None,
) -> int:
    """Run a job and return its exit code.

    If ``end_at`` is given, the function kills all ranks once, when iteration ``end_at`` is committed.
    """
    argv = [sys.executable, "-m", "moevement_cli.main", "launch", "--nproc", str(arguments.nproc), *options, *words]
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    with _console(run_dir).open("wb") as console:
        process = subprocess.Popen(
            [*argv, "--run-dir", str(run_dir)], stdout=console, stderr=console,
            env={**os.environ, log.FORMAT_ENV: "json"},
        )  # fmt: skip
    try:
        deadline = time.monotonic() + arguments.timeout
        if end_at is not None:
            _kill_all(process, RunRecord(run_dir), end_at, deadline)
        return process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{run_dir.name}: the job has not ended after {arguments.timeout:g} s (--timeout); last line of the "
            f"launcher: {_last_line(run_dir)}"
        ) from None
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def _kill_all(process: subprocess.Popen[bytes], record: RunRecord, end_at: int, deadline: float) -> None:
    """Kill all ranks at once when iteration ``end_at`` is committed.

    A window has to be on disk by then, because the job goes back to it.
    """
    while process.poll() is None and time.monotonic() < deadline:
        newest = record.newest_metric()
        if newest is not None and newest["iteration"] >= end_at:
            for member in json.loads(record.ranks_path.read_text(encoding="utf-8")):
                if member["role"] == "active":
                    with suppress(ProcessLookupError):
                        os.kill(member["pid"], signal.SIGKILL)
            return
        time.sleep(LOOK_S)


def _console(run_dir: Path) -> Path:
    return run_dir.with_suffix(".console")


def _last_line(run_dir: Path) -> str:
    return (_console(run_dir).read_text(encoding="utf-8", errors="replace").strip().splitlines() or [""])[-1]


def _reason(run_dir: Path, code: int) -> str:
    return f"exit code {code}: {_last_line(run_dir)}"


def _found(kind: FlipKind, run_dir: Path, code: int, wanted: str) -> DrillResult:
    lines = sorted(_lines(run_dir / "logs"), key=lambda line: line["time"])
    record = RunRecord(run_dir)
    is_equal = code == 0 and record.summary()["state_digest"]["all"] == wanted
    ended_by = _reason(run_dir, code) if code else None
    flip = next((line for line in lines if line[log.NAME].startswith(PREFIX)), None)
    result = DrillResult(kind, flipped=None, damage=None, rank=None, after_s=None, is_equal=is_equal, ended_by=ended_by)
    if flip is None:
        return result
    result = replace(result, flipped={**json.loads(flip[log.NAME].removeprefix(PREFIX)), "time": flip["time"]})
    for line in lines:
        if line["time"] >= flip["time"] and (damage := Damage.parse(line[log.NAME])) is not None:
            return replace(result, damage=damage, rank=line["rank"], after_s=line["time"] - flip["time"])
    return result


def _lines(logs: Path) -> Iterator[dict[str, Any]]:
    """Yield the log records of this project from the output of all ranks, as plain data."""
    for path in sorted(logs.glob("*.out*")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(log.PREFIXES[1]):
                yield dict(json.loads(line))


def _place(at: dict[str, Any]) -> str:
    return (
        f"{at['what']} (iteration {at['iteration']} of rank {at['owner']}, on rank {at['rank']}; byte {at['byte']}, "
        f"bit {at['bit']})"
    )


def _print(results: Sequence[DrillResult], console: Console) -> None:
    table = Table("kind", "flipped", "found by", "after", "instead", "final state", show_lines=True)
    for result in results:
        table.add_row(
            result.kind,
            "NO SUCH DATA IN USE" if result.flipped is None else _place(result.flipped),
            "NOT FOUND" if result.damage is None else f"{result.damage.check}, on rank {result.rank}",
            "" if result.after_s is None else f"{1e3 * result.after_s:.0f} ms",
            "" if result.damage is None else result.damage.action,
            result.outcome,
        )  # fmt: skip
    console.print(table)
