"""Bodies of checks for tests of the runner, called in processes of their own."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from benchmarks.gpu.check import NotRun, Report

FOLDER_ENV = "TEST_GPU_BODIES"
"""Folder through which a body that blocks and its test talk."""


def holds(report: Report) -> None:
    report.figure("rate", 12.3456789, "GB/s")
    report.claim("it holds", True)


def fails(report: Report) -> None:
    report.claim("one that holds", True)
    report.claim("one that does not", False)


def measures(report: Report) -> None:
    report.figure("a | bar", "words")


def crashes(report: Report) -> None:
    """As a broken CUDA context may: with a figure reported, and no chance to clean up."""
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
    """Wait, with a process that it has started, until the test lets it go on."""
    folder = Path(os.environ[FOLDER_ENV])
    if not (folder / "release").exists():
        (folder / "started").write_text(str(os.getpid()))
        while True:
            time.sleep(0.05)
    report.claim("it was released", True)
