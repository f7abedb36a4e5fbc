"""Class of a check, and the report through which its body records findings."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

OWN_PACKAGES = ("benchmarks", "megatron.moevement", "moevement_cli", "moevement_core", "moevement_kernels", "tests")
"""Packages of this repository. A missing module in one of them is a defect, not a missing requirement."""


class Form(StrEnum):
    """Kind of hardware that the checks of a call run on."""

    GPU = "gpu"
    CPU = "cpu"
    """Rehearsal with gloo, host memory, Triton's interpreter and tiny sizes. It settles nothing about a GPU."""
    SHARED = "shared"
    """Checks of several devices, with ranks that share the only GPU (:mod:`benchmarks.gpu.shared`)."""


class Status(StrEnum):
    """Outcome of a check."""

    PASSED = "passed"
    FAILED = "failed"
    FIGURE = "figure"
    """The check has measurements, and no claim that could fail."""
    NOT_RUN = "not run"
    TIMED_OUT = "timed out"
    CRASHED = "crashed"


class NotRun(Exception):
    """Exception that a body raises if the check cannot run here. Its text is the reason."""


@dataclass(frozen=True)
class Check:
    """Question that only a GPU answers."""

    number: str
    """Number of the check: ``E1`` to ``E20`` on one device, ``M1`` to ``M10`` on several."""
    name: str
    """Name of the check for ``--only``, and name of its result file."""
    claim: str
    """Statement of the documentation that the check settles, as a sentence."""
    page: str
    """Path of the page with the statement, from the root of the repository."""
    body: str
    """Function of the check as ``module:function``. It gets a :class:`Report` and runs in its own process."""
    limit_s: float
    """Seconds after which the processes of the check are killed."""
    devices: int = 1
    """Number of GPUs that the check needs."""
    has_cpu_form: bool = False
    """True if a part of the check runs without a GPU."""
    can_share: bool = False
    """True if the check has a meaningful result with all its ranks on one GPU."""

    def form(self, devices: int) -> Form:
        """Return the form in which the check runs on a machine with this number of GPUs."""
        if not devices:
            return Form.CPU
        return Form.SHARED if devices == 1 and self.devices > 1 and self.can_share else Form.GPU


@dataclass
class Findings:
    """Findings of a check's body so far."""

    figures: list[list[str]] = field(default_factory=list)
    """Name, value and unit of each measurement."""
    claims: list[list[Any]] = field(default_factory=list)
    """Tested statements, each with True if it held."""
    not_run: str = ""
    """Reason that the body gave for not answering. Empty if it gave no such reason."""
    is_complete: bool = False
    """True if the body returned."""


class Report:
    """Findings of one check. Each addition writes them to a file, so that a kill loses nothing.

    Args:
        path: file of the findings.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._found = path, Findings()

    def figure(self, name: str, value: float | str, unit: str = "") -> None:
        """Record a measurement. Floats are rounded to four digits."""
        text = value if isinstance(value, str) else f"{value:.4g}" if isinstance(value, float) else str(value)
        self._found.figures.append([name, text, unit])
        self._keep()

    def claim(self, statement: str, holds: bool) -> None:
        """Record whether a statement held here. The check fails if any statement did not hold."""
        self._found.claims.append([statement, bool(holds)])
        self._keep()

    def not_run(self, reason: str) -> None:
        """Record why the check gives no answer here."""
        self._found.not_run = reason
        self._keep()

    def complete(self) -> None:
        """Record that the body returned."""
        self._found.is_complete = True
        self._keep()

    def _keep(self) -> None:
        write_whole(self._path, json.dumps(asdict(self._found)))


def read_findings(path: Path) -> Findings:
    """Return the findings that a body wrote. They are empty if the body was killed before its first finding."""
    try:
        return Findings(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return Findings()


def write_whole(path: Path, text: str) -> None:
    """Replace the file at ``path`` atomically: a reader finds the complete old or new text, even after a kill."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def run_body(body: str, path: str) -> None:
    """Run the body of a check in this process, and write its findings to the file at ``path``."""
    report = Report(Path(path))
    try:
        function_of(body)(report)
    except NotRun as reason:
        report.not_run(str(reason))
    except ModuleNotFoundError as error:
        if (error.name or "").startswith(OWN_PACKAGES):
            raise
        report.not_run(f"needs the package {error.name}")
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # the interpreter may hang at exit with a broken CUDA context
    report.complete()


def function_of(name: str) -> Callable[..., Any]:
    """Return the function that ``module:function`` names."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)
