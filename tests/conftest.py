"""Fixtures of more than one test module, and the environment that all worker processes of a test session share."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import hypothesis
import pytest

from tests.failure_free import FOLDER_ENV
from tests.reporting import pytest_collection_modifyitems  # noqa: F401

# Tests use one small corpus and one folder of failure-free runs, and never the user's own cache. The first process of a
# session creates the folder; workers (pytest -n) inherit its environment.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _session_folder = tempfile.TemporaryDirectory(prefix="moevement-tests-")
    os.environ["MOEVEMENT_CACHE"] = str(Path(_session_folder.name) / "cache")
    os.environ[FOLDER_ENV] = str(Path(_session_folder.name) / "failure_free")
    Path(os.environ[FOLDER_ENV]).mkdir()
os.environ["MOEVEMENT_PLATFORM"] = "cpu"

from megatron.moevement import checkout, platform
from moevement_core import log


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--megatron", type=Path, metavar="DIR", help="test with this checkout of Megatron-LM, not with megatron-core"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Choose the Megatron of this process, and of all processes that tests start, before a test module imports it."""
    if (folder := config.getoption("--megatron")) is not None:
        if config.inipath != Path(__file__).parents[1] / "pyproject.toml":
            raise pytest.UsageError(f"pytest has read {config.inipath}; write --megatron={folder}, with an equals sign")
        checkout.use(folder)
        checkout.note_checkout()
    platform.install()


# The logger does not propagate, so pytest captures its output only if it is configured before the test begins.
log.get()

# A shell starts background jobs with SIGINT ignored, and the processes that tests start and interrupt would inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The duration of an example depends on the other load of the machine, so it has no deadline.
hypothesis.settings.register_profile("without_deadline", deadline=None)
hypothesis.settings.load_profile("without_deadline")


@pytest.fixture(scope="session", autouse=True)
def embedded_corpus() -> Path:
    """Build the embedded corpus in the cache of the test session, where ranks find it, and return its prefix."""
    from megatron.moevement.data import embedded

    return embedded.corpus_prefix()


@pytest.fixture(scope="session")
def same_weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Return flags with which any layout of :data:`tests.training.TINY` starts from the same weights.

    Initial weights depend on the seed of the pipeline rank, so without these flags no two layouts are comparable.
    """
    from tests.training import start_from

    return start_from(tmp_path_factory.mktemp("weights"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return the number of workers for ``-n auto``: one for each core, but at most one for each 4 GB of memory."""
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return max(1, min(os.cpu_count() or 1, int(gigabytes / 4)))
