"""``moevement drill``: bits are flipped in a job's data; by what is each found, and what is done instead?

One job for each kind of data, with the failure by which the damaged data is needed; and one without either, whose final
state all others have to come to.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from moevement_cli.examples import EXAMPLES
from moevement_core import log
from moevement_core.damage import Damage
from moevement_core.errors import ConfigError
from moevement_core.injection import FlipKind
from moevement_core.run_record import RunRecord
from moevement_core.session.flips import PREFIX

ALL = "all"
AFTER = 6
"""Iterations that the preset goes on for after the failure."""
PRESET = [
    str(EXAMPLES / "pretrain_moe" / "pretrain_gpt.py"), "--config",
    str(EXAMPLES / "pretrain_moe" / "configs" / "laptop.yaml"), "--hidden-size", "64", "--ffn-hidden-size", "64",
    "--moe-ffn-hidden-size", "64", "--seq-length", "64", "--max-position-embeddings", "64", "--eval-iters", "0",
    "--lr-decay-iters", "1000",
]  # fmt: skip
"""The laptop's, a quarter the size."""
SENT = (FlipKind.WIRE, FlipKind.HEADERS, FlipKind.MESSAGES)
"""On their way before anybody fails."""
LOOK_S = 0.02
LEAD = 5
"""Iterations before the failure in which the rank that will be lost sends these: peers that lag have them by then."""


@dataclass(frozen=True)
class Found:
    """What came of one kind."""

    kind: str
    flipped: dict[str, Any] | None
    """A :class:`~moevement_core.session.flips.Place`, and when; None: no such data was in use."""
    damage: Damage | None
    """None: it was not found."""
    rank: int | None
    """That found it."""
    after_s: float | None
    """From the flip to that."""
    is_equal: bool
    """Whether the final state is that of the undamaged run."""
    ended_by: str | None
    """Why the job ended before it had one."""

    @property
    def is_right(self) -> bool:
        """Whether it was found, and nobody went on with it."""
        return self.flipped is not None and self.damage is not None and (self.is_equal or bool(self.ended_by))

    @property
    def outcome(self) -> str:
        """Of the job, in words."""
        if self.ended_by is not None:
            return f"the job ended: {self.ended_by}"
        return "as undamaged" if self.is_equal else "ANOTHER FINAL STATE"


def add_to(parser: argparse.ArgumentParser) -> None:
    """Its description and arguments."""
    parser.description = (
        "Flip a bit in data of a running job of this host, let ranks be killed so that the data is needed, and report "
        "by what the damage was found, how soon, and what was done instead; one job for each kind. Exits with 0 only "
        "if all of it was found and every job came to the final state of an undamaged one, or ended with a reason."
    )
    parser.add_argument(
        "--flip", nargs="+", choices=[*(kind.value for kind in FlipKind), ALL], default=[ALL], metavar="KIND",
        help=f"what is damaged: {', '.join(FlipKind)}, or all (default: all)",
    )  # fmt: skip
    parser.add_argument("--at", type=int, default=10, metavar="N", help="iteration of the failure (default: 10)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="draws which tensor and bit (default: 0)")
    parser.add_argument("--nproc", type=int, default=4, metavar="N", help="ranks (default: 4)")
    parser.add_argument("--kill", type=int, default=1, metavar="RANK", help="the rank that is killed (default: 1)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep the jobs' run directories here")
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="seconds that a job may take (default: 600)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument(
        "job", nargs=argparse.REMAINDER, metavar="-- SCRIPT ARGS",
        help="a training script and its flags (default: the laptop preset, a quarter the size)",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand; returns the exit code."""
    if not 0 <= arguments.kill < arguments.nproc or arguments.at <= LEAD or arguments.seed < 0:
        raise ConfigError(
            f"--kill {arguments.kill} --nproc {arguments.nproc} --at {arguments.at} --seed {arguments.seed}; needs a "
            f"rank of the job, an iteration after {LEAD}, and a seed from 0 on"
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
        raise ConfigError(f"the job fails without any damage ({_reason(undamaged.folder, code)}); mend that first")
    wanted = str(undamaged.summary()["state_digest"]["all"])
    results = []
    for number, kind in enumerate(kinds, start=1):
        print(f"{kind} ({number} of {len(kinds)}) ...", flush=True)
        run_dir = out / kind
        end_at = arguments.at if kind is FlipKind.WINDOWS else None
        code = _launch(arguments, [*words, *_faults(arguments, kind, out)], ["--spares", "2"], run_dir, end_at)
        results.append(_found(kind, run_dir, code, wanted))
    _print(results, Console())
    missed = [one.kind for one in results if not one.is_right]
    print(
        f"{len(results) - len(missed)} of {len(results)} found" + (f"; NOT RIGHT: {', '.join(missed)}" * bool(missed))
    )
    if arguments.json:
        told = [{**asdict(one), "is_right": one.is_right} for one in results]
        print(json.dumps({"seed": arguments.seed, "at": arguments.at, "drills": told}))
    return 1 if missed else 0


def _job(arguments: argparse.Namespace) -> list[str]:
    """The script and its flags."""
    given = arguments.job[1:] if arguments.job[:1] == ["--"] else arguments.job
    words = given or [*PRESET, "--train-iters", str(arguments.at + AFTER)]
    return words if "--moevement-sparse-ckpt" in words else [*words, "--moevement-sparse-ckpt"]


def _faults(arguments: argparse.Namespace, kind: FlipKind, out: Path) -> list[str]:
    """The flip, who is killed for it to be needed, and what protects the job."""
    first = arguments.at - LEAD if kind in SENT else 0
    where = f",rank={arguments.kill}" if kind in SENT else ""
    words = ["--moevement-inject-flip", f"kind={kind},iteration={first},seed={arguments.seed}{where}"]
    words += ["--moevement-recovery", "redo" if kind is FlipKind.GRADIENTS else "replay"]
    if kind is not FlipKind.WINDOWS:  # then all ranks are killed from outside, at once
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
    """Run a job to its end, and kill all its ranks once when iteration ``end_at`` is committed; its exit code."""
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
            f"{run_dir.name}: not over after {arguments.timeout:g} s (--timeout); what its launcher said last: "
            f"{_last_line(run_dir)}"
        ) from None
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def _kill_all(process: subprocess.Popen[bytes], record: RunRecord, end_at: int, deadline: float) -> None:
    """All ranks at once, when a window must be on disk and iteration ``end_at`` is committed."""
    while process.poll() is None and time.monotonic() < deadline:
        newest = record.newest_metric()
        if newest is not None and newest["iteration"] >= end_at:
            for one in json.loads(record.ranks_path.read_text(encoding="utf-8")):
                if one["role"] == "active":
                    with suppress(ProcessLookupError):
                        os.kill(one["pid"], signal.SIGKILL)
            return
        time.sleep(LOOK_S)


def _console(run_dir: Path) -> Path:
    return run_dir.with_suffix(".console")


def _last_line(run_dir: Path) -> str:
    return (_console(run_dir).read_text(encoding="utf-8", errors="replace").strip().splitlines() or [""])[-1]


def _reason(run_dir: Path, code: int) -> str:
    return f"exit code {code}: {_last_line(run_dir)}"


def _found(kind: FlipKind, run_dir: Path, code: int, wanted: str) -> Found:
    lines = sorted(_lines(run_dir / "logs"), key=lambda line: line["time"])
    record = RunRecord(run_dir)
    is_equal = code == 0 and record.summary()["state_digest"]["all"] == wanted
    ended_by = _reason(run_dir, code) if code else None
    flip = next((line for line in lines if line[log.NAME].startswith(PREFIX)), None)
    if flip is None:
        return Found(kind, None, None, None, None, is_equal, ended_by)
    flipped = {**json.loads(flip[log.NAME].removeprefix(PREFIX)), "time": flip["time"]}
    for line in lines:
        if line["time"] >= flip["time"] and (damage := Damage.parse(line[log.NAME])) is not None:
            return Found(kind, flipped, damage, line["rank"], line["time"] - flip["time"], is_equal, ended_by)
    return Found(kind, flipped, None, None, None, is_equal, ended_by)


def _lines(logs: Path) -> Iterator[dict[str, Any]]:
    """What this project says in the logs of all ranks."""
    for path in sorted(logs.glob("*.out*")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(log.PREFIXES[1]):
                yield dict(json.loads(line))


def _place(at: dict[str, Any]) -> str:
    return (
        f"{at['what']} (iteration {at['iteration']} of rank {at['owner']}, on rank {at['rank']}; byte {at['byte']}, "
        f"bit {at['bit']})"
    )


def _print(results: Sequence[Found], console: Console) -> None:
    table = Table("kind", "flipped", "found by", "after", "instead", "final state", show_lines=True)
    for one in results:
        table.add_row(
            one.kind,
            "NO SUCH DATA IN USE" if one.flipped is None else _place(one.flipped),
            "NOT FOUND" if one.damage is None else f"{one.damage.by}, on rank {one.rank}",
            "" if one.after_s is None else f"{1e3 * one.after_s:.0f} ms",
            "" if one.damage is None else one.damage.instead,
            one.outcome,
        )  # fmt: skip
    console.print(table)
