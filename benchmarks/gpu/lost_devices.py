"""Checks of a rank with a broken device and a rank in a long C call, with the real launcher and in-process restarts."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.check import Report
from benchmarks.gpu.launched import launch
from benchmarks.gpu.scripts.troubled import CALL_S, HANG_S

SCRIPT = Path(__file__).parent / "scripts" / "troubled.py"


def broken_device(report: Report) -> None:
    """Let one rank read out of bounds on a device that a spare shares."""
    code, lines, _ = _run("broken-device")
    first = [line for line in lines if line["pid"] == lines[0]["pid"]]
    ended = [line for line in lines if line["what"] == "ended"]
    report.figure("exit code of the job", code)
    report.figure("generations entered by the rank with the broken device", len(first))
    report.figure("generations in all", max(line["generation"] for line in lines) + 1)
    report.claim("the job ends well", code == 0 and bool(ended))
    report.claim("the process with the broken device gives its rank back at once", len(first) == 1)
    report.claim("another process has the rank in the end", bool(ended) and ended[-1]["pid"] != lines[0]["pid"])


def long_call(report: Report) -> None:
    """Let one rank make a C call during its set-up that takes longer than the limit for a hang."""
    code, lines, _ = _run("long-call")
    report.figure("the call, and the limit for a hang", f"{CALL_S:g}, {HANG_S['long-call']:g}", "s")
    report.figure("exit code of the job", code)
    report.figure("generations in all", max(line["generation"] for line in lines) + 1)
    report.claim("the job ends well", code == 0)
    report.claim("the call is not taken for a hang", {line["generation"] for line in lines} == {0})


def _run(trouble: str) -> tuple[int, list[dict[str, Any]], str]:
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "lines.jsonl"
        options = ["--trainer", "torch", "--nproc", "1", "--spares", "1"]
        code, output = launch([*options, str(SCRIPT), trouble, str(lines)], limit_s=600)
        print(output)
        return code, [json.loads(line) for line in lines.read_text().splitlines()], output
