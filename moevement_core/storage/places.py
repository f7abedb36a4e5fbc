"""Choice of the kind of place that a location names."""

from __future__ import annotations

from pathlib import Path

from moevement_core.storage.folder_store import FolderStore
from moevement_core.storage.locations import is_url
from moevement_core.storage.object_store import ObjectStore
from moevement_core.storage.store import WindowStore


def store_at(location: str) -> WindowStore:
    """Return the place that ``location`` names, a folder's path or a URL, without a look at it."""
    return ObjectStore(location) if is_url(location) else FolderStore(Path(location).resolve())
