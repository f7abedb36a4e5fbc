"""Flags of windows on disk."""

from __future__ import annotations

from dataclasses import dataclass

from moevement_core.util.flags import flag


@dataclass(frozen=True)
class DiskConfig:
    """Configuration of windows on disk: the folders to write to and to load from."""

    persist_dir: str | None = flag(
        "--moevement-persist-dir", metavar="DIR",
        help="also write persisted windows into this folder, beside training: one for the whole job, or one on each "
        "node, which then holds the copies that its ranks keep too; {node} in the name becomes the node's",
    )  # fmt: skip
    load: str | None = flag(
        "--moevement-load", metavar="DIR",
        help="start from the newest window in this folder, if it reaches further than --load; the folder may be that "
        "of --moevement-persist-dir, and empty",
    )  # fmt: skip
