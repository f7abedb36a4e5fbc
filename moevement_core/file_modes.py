"""Permissions of what a job writes: run directories and windows belong to their user alone, unless asked for otherwise.

They hold weights, and names of files and hosts. A stricter umask stays what it is; a laxer one is not followed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from moevement_core.errors import ConfigError
from moevement_core.flags import flag

FLAG = "--moevement-file-mode"
ENV = "MOEVEMENT_FILE_MODE"
"""The default of the flag; for ``moevement coordinate``, which does not see the script's flags."""


class FileMode(StrEnum):
    """Groups of users that may read a file."""

    PRIVATE = "private"
    GROUP = "group"
    ALL = "all"

    @property
    def bits(self) -> int:
        """Mode bits of a file; a folder has those to enter it, too."""
        return {FileMode.PRIVATE: 0o600, FileMode.GROUP: 0o640, FileMode.ALL: 0o644}[self]

    @property
    def folder_bits(self) -> int:
        """Mode bits of a folder."""
        return {FileMode.PRIVATE: 0o700, FileMode.GROUP: 0o750, FileMode.ALL: 0o755}[self]


def _mode(name: str, text: str | None) -> Any:
    try:
        return FileMode(text or os.environ.get(ENV) or FileMode.PRIVATE)
    except ValueError:
        value = text or f"{ENV}={os.environ.get(ENV)}"
        raise ConfigError(f"{name} {value}; needs one of {', '.join(FileMode)}") from None


@dataclass(frozen=True)
class FilesConfig:
    """The flags of what is written."""

    mode: FileMode = flag(
        FLAG, metavar="MODE", default=None, check=_mode,
        help="who may read run directories and windows on disk that this job makes: private, group or all; folders "
        "that are there keep their mode (default: private)",
    )  # fmt: skip


_now: FileMode | None = None


def use_file_mode(text: str | None) -> None:
    """Write so from now on, in this process.

    Args:
        text: the value of ``--moevement-file-mode``; None where it was not given.

    Raises:
        ConfigError: it is none.
    """
    global _now
    _now = _mode(FLAG, text)


def file_mode() -> FileMode:
    """Return the mode with which this process writes.

    Raises:
        ConfigError: the default in the environment is none.
    """
    return _now if _now is not None else FileMode(_mode(FLAG, None))


def make_folder(folder: Path) -> None:
    """Make it, and all above it that is not there.

    Raises:
        OSError: it cannot be made.
    """
    try:
        folder.mkdir(mode=file_mode().folder_bits, exist_ok=True)
    except FileNotFoundError:
        if folder.parent == folder:
            raise
        make_folder(folder.parent)
        folder.mkdir(mode=file_mode().folder_bits, exist_ok=True)


def opener(path: str, flags: int) -> int:
    """Open a file with this process's mode; for ``open(..., opener=opener)``."""
    return os.open(path, flags, file_mode().bits)
