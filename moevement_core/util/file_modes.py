"""Permissions of the files that a job writes: run directories and windows are private to their user by default.

They are private because they hold weights, and names of files and hosts. If the umask is stricter than the mode, the
umask stays in force; if it is laxer, it has no effect.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from moevement_core.errors import ConfigError
from moevement_core.util.flags import flag

FLAG = "--moevement-file-mode"
ENV = "MOEVEMENT_FILE_MODE"
"""Environment variable with the default of ``--moevement-file-mode``. ``moevement coordinate`` takes the mode from it,
because that command does not see the flags of the training script."""


class FileMode(StrEnum):
    """Users who may read a file: its owner, its group, or all."""

    PRIVATE = "private"
    GROUP = "group"
    ALL = "all"

    @property
    def bits(self) -> int:
        """Mode bits of a file."""
        return {FileMode.PRIVATE: 0o600, FileMode.GROUP: 0o640, FileMode.ALL: 0o644}[self]

    @property
    def folder_bits(self) -> int:
        """Mode bits of a folder; whoever may read the folder may also enter it."""
        return {FileMode.PRIVATE: 0o700, FileMode.GROUP: 0o750, FileMode.ALL: 0o755}[self]


def _mode(name: str, text: str | None) -> Any:
    try:
        return FileMode(text or os.environ.get(ENV) or FileMode.PRIVATE)
    except ValueError:
        value = text or f"{ENV}={os.environ.get(ENV)}"
        raise ConfigError(f"{name} {value}; needs one of {', '.join(FileMode)}") from None


@dataclass(frozen=True)
class FilesConfig:
    """Flags for the files that a job writes."""

    mode: FileMode = flag(
        FLAG, metavar="MODE", default=None, check=_mode,
        help="users who may read the run directories and windows on disk that this job creates: private (only this "
        "user), group or all; existing folders keep their mode (default: private)",
    )  # fmt: skip


_now: FileMode | None = None


def use_file_mode(text: str | None) -> None:
    """Set the mode with which this process writes files from now on.

    Args:
        text: value of ``--moevement-file-mode``; None: the flag was left out.

    Raises:
        ConfigError: the value is not a file mode.
    """
    global _now
    _now = _mode(FLAG, text)


def file_mode() -> FileMode:
    """Return the mode with which this process writes files.

    Raises:
        ConfigError: the default in the environment is not a file mode.
    """
    return _now if _now is not None else FileMode(_mode(FLAG, None))


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents, with this process's mode.

    Raises:
        OSError: a folder cannot be created.
    """
    try:
        folder.mkdir(mode=file_mode().folder_bits, exist_ok=True)
    except FileNotFoundError:
        if folder.parent == folder:
            raise
        make_folder(folder.parent)
        folder.mkdir(mode=file_mode().folder_bits, exist_ok=True)


def opener(path: str, flags: int) -> int:
    """Open a file with this process's mode; a function for ``open(..., opener=opener)``."""
    return os.open(path, flags, file_mode().bits)
