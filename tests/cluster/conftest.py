"""One cluster for all tests here; each finds it as it was switched on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.cluster import Cluster, why_not


@pytest.fixture(scope="session")
def _machines() -> Iterator[Cluster]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with Cluster(nodes=3) as cluster:
        yield cluster


@pytest.fixture
def cluster(_machines: Cluster) -> Iterator[Cluster]:
    """Three idle nodes; what a test did to them is undone after it."""
    yield _machines
    _machines.restore()


@pytest.fixture
def six_nodes() -> Iterator[Cluster]:
    """A cluster for one test, in which a rank can have a node for itself."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with Cluster(nodes=6) as cluster:
        yield cluster
