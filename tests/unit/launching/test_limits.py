"""Limits of a host on threads and open files (:mod:`moevement_core.launching.limits`)."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from moevement_core.errors import ConfigError
from moevement_core.launching.limits import (
    FILES_FOR_A_PEER,
    OTHER_FILES,
    allow_open_files,
)


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, int]]:
    """Return the soft and hard limit that this process seems to have; a test may change them."""
    values = {"files": (1024, 65536)}
    monkeypatch.setattr(resource, "getrlimit", lambda _: values["files"])
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: values.update(files=both))
    return values


def test_a_small_job_leaves_the_limit_of_open_files(limits: dict[str, tuple[int, int]]) -> None:
    allow_open_files(4, 15)
    assert limits["files"] == (1024, 65536)


def test_a_large_job_raises_the_soft_limit_to_its_need_and_says_so(
    limits: dict[str, tuple[int, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    allow_open_files(1024, 3300)
    output = capsys.readouterr().out
    assert str(OTHER_FILES + 1024 * FILES_FOR_A_PEER) in output
    assert "1024" in output
    assert limits["files"] == (OTHER_FILES + 1024 * FILES_FOR_A_PEER, 65536)
    allow_open_files(8, 27)
    assert limits["files"] == (OTHER_FILES + 1024 * FILES_FOR_A_PEER, 65536), "a limit was lowered"


def test_a_hard_limit_that_is_too_low_for_the_store_is_refused(limits: dict[str, tuple[int, int]]) -> None:
    limits["files"] = (1024, 3000)
    with pytest.raises(ConfigError, match=r"\b3000\b.*\b3300\b"):
        allow_open_files(1024, 3300)
    assert limits["files"] == (1024, 3000)


def test_a_hard_limit_that_may_be_too_low_for_a_rank_is_warned_of(
    limits: dict[str, tuple[int, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    limits["files"] = (1024, 4096)
    allow_open_files(1024, 3300)
    assert limits["files"] == (4096, 4096)
    warning = capsys.readouterr().err
    assert "4096" in warning
    assert "16640" in warning


def test_no_limit_is_no_problem(limits: dict[str, tuple[int, int]]) -> None:
    limits["files"] = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    allow_open_files(16_384, 49_500)
    limits["files"] = (1024, resource.RLIM_INFINITY)
    allow_open_files(16_384, 49_500)
    assert limits["files"] == (OTHER_FILES + 16_384 * FILES_FOR_A_PEER, resource.RLIM_INFINITY)


def test_processes_started_later_have_the_raised_limit() -> None:
    """Let a new process lower and raise its real limit. Check the limit of the process that it then starts."""
    program = (
        "import resource, subprocess; from moevement_core.launching.limits import allow_open_files\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (300, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "allow_open_files(20, 63)\n"
        "print(subprocess.run(['sh', '-c', 'ulimit -Sn'], capture_output=True, text=True).stdout)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(ended.stdout.split()[-1]) == OTHER_FILES + 20 * FILES_FOR_A_PEER
