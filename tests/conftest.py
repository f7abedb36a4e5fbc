"""Fixtures that more than one test module uses."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import hypothesis
import pytest

# Tests use one small corpus and never the cache of the person who runs them.
_corpus_home = tempfile.TemporaryDirectory(prefix="moevement-tests-")
os.environ["MOEVEMENT_CACHE"] = _corpus_home.name
os.environ["MOEVEMENT_PLATFORM"] = "cpu"

from megatron.moevement import platform  # noqa: E402

platform.install()

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
