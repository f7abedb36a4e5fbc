"""Bodies of GPU checks for the tests of the runner, which calls each body in a process of its own."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from benchmarks.gpu.check import NotRun, Report

FOLDER_ENV = "TEST_GPU_BODIES"
"""Environment variable with the folder in which :func:`blocks` and its test exchange files."""


def holds(report: Report) -> None:
    report.figure("rate", 12.3456789, "GB/s")
    report.claim("it holds", True)


def fails(report: Report) -> None:
    report.claim("one that holds", True)
    report.claim("one that does not", False)


def measures(report: Report) -> None:
    report.figure("a | bar", "words")


def crashes(report: Report) -> None:
    """Report a figure, then die by a signal without cleaning up, as a process with a broken CUDA context may."""
    report.figure("before the crash", 1)
    os.kill(os.getpid(), signal.SIGSEGV)


def raises(report: Report) -> None:
    report.claim("true so far", True)
    raise RuntimeError("a CUDA error, say")


def hangs(report: Report) -> None:
    while True:
        time.sleep(1)


def lacks_a_package(report: Report) -> None:
    import a_package_that_is_not_there  # type: ignore[import-not-found]  # noqa: F401


def is_not_for_here(report: Report) -> None:
    raise NotRun("another recipe is needed")


def blocks(report: Report) -> None:
    """Write the process id and block forever, unless the test has created the file ``release``."""
    folder = Path(os.environ[FOLDER_ENV])
    if not (folder / "release").exists():
        (folder / "started").write_text(str(os.getpid()))
        while True:
            time.sleep(0.05)
    report.claim("it was released", True)
