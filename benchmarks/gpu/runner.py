"""Runner of checks. It runs each check in its own process, and writes the result into a folder.

A result file is either complete or missing. A call that is interrupted, even by SIGKILL, loses only the check that was
running. The next call starts with it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu.check import Check, Findings, Form, Status, read_findings, run_body, write_whole
from benchmarks.gpu.processes import Process


@dataclass(frozen=True)
class Result:
    """Result of one check."""

    number: str
    name: str
    status: Status
    form: Form
    why: str = ""
    """Reason for a missing answer, or the end of the output after a crash."""
    figures: Sequence[Sequence[str]] = ()
    claims: Sequence[Sequence[Any]] = ()
    began: str = ""
    """Date and time at which the check began, UTC."""
    took_s: float = 0.0
    limit_s: float = 0.0
    machine: dict[str, str] = field(default_factory=dict)
    """Hardware and versions of the machine."""


def result_of(folder: Path, check: Check) -> Result | None:
    """Return the result of a check in the folder. Return None if there is no readable result."""
    try:
        read = json.loads((folder / f"{check.name}.json").read_text(encoding="utf-8"))
        return Result(**{**read, "status": Status(read["status"]), "form": Form(read["form"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_answered(result: Result | None, form: Form) -> bool:
    """Return True if the check ran in this form and has a result."""
    return result is not None and result.form is form and result.status is not Status.NOT_RUN


def run(
    checks: Iterable[Check], folder: Path, machine: dict[str, str], *, again: bool = False, limit_s: float | None = None
) -> Iterator[Result]:
    """Run the checks that have no answer yet, and yield each result after writing it.

    Args:
        checks: checks in their order.
        folder: folder of results.
        machine: description from :func:`benchmarks.gpu.machine.describe`. ``devices`` is the number of GPUs.
        again: True: also run checks that have an answer.
        limit_s: limit of each check in seconds. None: the checks' own limits.
    """
    for check in checks:
        form = check.form(int(machine["devices"]))
        if not again and is_answered(result_of(folder, check), form):
            continue
        result = _run(check, folder, form=form, machine=machine, limit_s=limit_s or check.limit_s)
        write_whole(folder / f"{check.name}.json", json.dumps(asdict(result), indent=1) + "\n")
        yield result


def _run(check: Check, folder: Path, form: Form, machine: dict[str, str], limit_s: float) -> Result:
    began, began_s = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}", time.monotonic()

    def result(status: Status, why: str, findings: Findings) -> Result:
        took_s = round(time.monotonic() - began_s, 1)
        return Result(
            number=check.number,
            name=check.name,
            status=status,
            form=form,
            why=why,
            figures=findings.figures,
            claims=findings.claims,
            began=began,
            took_s=took_s,
            limit_s=limit_s,
            machine=machine,
        )

    if (reason := why_not(check, form, int(machine["devices"]))) is not None:
        return result(Status.NOT_RUN, reason, Findings())
    partial = folder / f"{check.name}.partial"
    partial.unlink(missing_ok=True)
    arguments = {"body": check.body, "path": str(partial.absolute())}
    environment = {"CUDA_VISIBLE_DEVICES": ""} if form is Form.CPU else {}
    with Process(run_body, arguments, environment, folder / f"{check.name}.log") as process:
        try:
            code = process.wait(limit_s)
            why = f"exit code {code}: {process.tail()}"
            status = None
        except TimeoutError as error:
            why, status = str(error), Status.TIMED_OUT
    findings = read_findings(partial)
    partial.unlink(missing_ok=True)
    if status is None and findings.not_run:
        return result(Status.NOT_RUN, findings.not_run, findings)
    if status is None and not findings.is_complete:
        status = Status.CRASHED
    if status is not None:
        return result(status, why, findings)
    return result(_verdict(findings), "", findings)


def why_not(check: Check, form: Form, devices: int) -> str | None:
    """Return the reason why a check cannot run on this machine. Return None if it can run."""
    if form is Form.CPU:
        return None if check.has_cpu_form else "no GPU"
    if form is Form.SHARED:
        return None
    return None if devices >= check.devices else f"needs {check.devices} GPUs, but this machine has {devices}"


def _verdict(findings: Findings) -> Status:
    if not findings.claims:
        return Status.FIGURE
    return Status.PASSED if all(holds for _, holds in findings.claims) else Status.FAILED


def duration(seconds: float) -> str:
    """Return a number of seconds as text for a table."""
    return f"{math.ceil(seconds)} s"
