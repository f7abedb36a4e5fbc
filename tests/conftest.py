"""Fixtures that more than one test module uses, and what all worker processes of a test session share."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import hypothesis
import pytest

from tests.failure_free import FOLDER_ENV
from tests.reporting import pytest_collection_modifyitems  # noqa: F401

# Tests use one small corpus and one folder of failure-free runs, and never the cache of the person who runs them. The
# first process of a session makes the folder; workers (pytest -n) inherit its environment.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _session_folder = tempfile.TemporaryDirectory(prefix="moevement-tests-")
    os.environ["MOEVEMENT_CACHE"] = str(Path(_session_folder.name) / "cache")
    os.environ[FOLDER_ENV] = str(Path(_session_folder.name) / "failure_free")
    Path(os.environ[FOLDER_ENV]).mkdir()
os.environ["MOEVEMENT_PLATFORM"] = "cpu"

from megatron.moevement import platform
from moevement_core import log

platform.install()
# pytest captures what a logger writes that does not propagate if it is configured when the test begins.
log.get()

# Ignored, as a shell starts what runs in the background, it would stay ignored in all that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says something of what else this machine does.
hypothesis.settings.register_profile("without_deadline", deadline=None)
hypothesis.settings.load_profile("without_deadline")


@pytest.fixture(scope="session", autouse=True)
def embedded_corpus() -> Path:
    """The embedded corpus in the tests' own cache, built once; ranks find it there."""
    from megatron.moevement.data import embedded

    return embedded.corpus_prefix()


@pytest.fixture(scope="session")
def same_weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Flags that make any layout of :data:`tests.training.TINY` start from the same weights.

    Fresh weights depend on the pipeline rank's seed, so layouts could not be compared.
    """
    from tests.training import start_from

    return start_from(tmp_path_factory.mktemp("weights"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return the number of workers for ``-n auto``: one for each core, and 4 GB of memory for each."""
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return max(1, min(os.cpu_count() or 1, int(gigabytes / 4)))
