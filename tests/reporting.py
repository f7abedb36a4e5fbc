"""Hook of pytest that adds the properties that :mod:`tests.durations` reads to the report (``--junitxml``)."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add the node id of each test, and its reason to be slow, to the properties of the test."""
    for item in items:
        item.user_properties.append(("nodeid", item.nodeid))
        if (marker := item.get_closest_marker("slow")) is not None:
            item.user_properties.append(("slow", marker.args[0]))
