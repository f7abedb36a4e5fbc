"""Flags of windows on disk."""

from __future__ import annotations

from dataclasses import dataclass

from moevement_core.util.flags import flag


@dataclass(frozen=True)
class DiskConfig:
    """Configuration of windows on disk: the folders to write to and to load from."""

    persist_dir: str | None = flag(
        "--moevement-persist-dir", metavar="DIR",
        help="folder for persisted windows, which ranks write beside training (default: none). It is either one folder "
        "for the whole job, or a folder on each node, which then also holds the copies that the node's ranks keep for "
        "others; {node} in the name is replaced by the name of the node",
    )  # fmt: skip
    load: str | None = flag(
        "--moevement-load", metavar="DIR",
        help="folder with windows. The job starts from the newest window if that window restores a later iteration "
        "than the checkpoint of --load. The folder may be empty, and may be the folder of --moevement-persist-dir",
    )  # fmt: skip
