"""Hook of pytest that puts into the report (``--junitxml``) what :mod:`tests.durations` reads."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add to the properties of each test its full name and its reason to be slow."""
    for item in items:
        item.user_properties.append(("nodeid", item.nodeid))
        if (marker := item.get_closest_marker("slow")) is not None:
            item.user_properties.append(("slow", marker.args[0]))
