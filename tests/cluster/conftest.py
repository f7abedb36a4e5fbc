"""Fixtures of clusters. Most tests share a cluster of three nodes, and each finds it freshly booted."""

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
    """Yield a cluster of three idle nodes; undo after the test what it did to them."""
    yield _machines
    _machines.restore()


@pytest.fixture
def six_nodes() -> Iterator[Cluster]:
    """Yield a cluster for one test, in which each rank can have its own node."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with Cluster(nodes=6) as cluster:
        yield cluster
