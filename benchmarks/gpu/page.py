"""Page of results, made from their files alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.gpu.check import Check, Form, Status
from benchmarks.gpu.runner import Result, duration, is_answered

REHEARSAL = (
    "**Rehearsal without a GPU.** Checks ran over gloo, host memory and Triton's interpreter, with tiny sizes. "
    "Nothing here says anything about a GPU."
)


def page(checks: Sequence[Check], results: Mapping[str, Result], machine: Mapping[str, str], command: str) -> str:
    """Return the page in Markdown.

    Args:
        checks: all checks in their order.
        results: results by the name of the check. A check without a result has not run yet.
        machine: hardware and versions of this call.
        command: command line that wrote the page.
    """
    devices = int(machine["devices"])
    rows = "\n".join(_row(check, results.get(check.name), check.form(devices)) for check in checks)
    facts = "\n".join(f"| {_cell(name)} | {_cell(value)} |" for name, value in machine.items() if name != "devices")
    sections = "\n\n".join(
        _section(check, results[check.name])
        for check in checks
        if check.name in results and results[check.name].status is not Status.NOT_RUN
    )
    heading = f"{REHEARSAL}\n\n" if devices == 0 else ""
    return f"""# Checks on a GPU

    {command}

{heading}| check | claim | page | result | took |
|---|---|---|---|---|
{rows}

| measured on | |
|---|---|
{facts}

{sections}
"""


def _row(check: Check, result: Result | None, form: Form) -> str:
    return (
        f"| {check.number} {check.name} | {check.claim} | {check.page} | {_outcome(result, form)} | {_took(result)} |"
    )


def _outcome(result: Result | None, form: Form) -> str:
    if result is None:
        return "not run: not reached yet"
    if result.status in (Status.NOT_RUN, Status.TIMED_OUT):
        text = f"{result.status}: {result.why}"
    elif result.status is Status.CRASHED:
        text = "crashed: see below"
    elif result.status is Status.FAILED:
        text = f"failed: {'; '.join(statement for statement, holds in result.claims if not holds)}"
    else:
        text = str(result.status)
    if result.form is Form.CPU and result.status is not Status.NOT_RUN:
        text = f"rehearsed on a CPU ({text})"
    elif result.form is Form.SHARED and result.status is not Status.NOT_RUN:
        text = f"{text}, ranks sharing one GPU"
    elif result.form is not form and is_answered(result, result.form):
        text += " (on another machine)"
    return _cell(text)


def _took(result: Result | None) -> str:
    return "" if result is None or result.status is Status.NOT_RUN else duration(result.took_s)


def _section(check: Check, result: Result) -> str:
    gpus = result.machine.get("GPUs", "unknown")
    lines = [f"## {check.number} {check.name}", f"{result.began} UTC, GPUs: {gpus}, limit {duration(result.limit_s)}."]
    if result.claims:
        lines.append("\n".join(f"- {'holds' if holds else 'DOES NOT HOLD'}: {text}" for text, holds in result.claims))
    if result.figures:
        table = "\n".join(f"| {_cell(name)} | {_cell(value)} | {_cell(unit)} |" for name, value, unit in result.figures)
        lines.append(f"| figure | value | unit |\n|---|---|---|\n{table}")
    if result.why:
        lines.append(f"```\n{result.why}\n```")
    return "\n\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")
