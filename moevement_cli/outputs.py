"""Files that a command writes at its end, looked at before its work is done."""

from __future__ import annotations

import os
from pathlib import Path

from moevement_core.errors import ConfigError


def check_output(flag: str, path: Path | None) -> None:
    """Raise if a file cannot be written; its folders are made.

    Args:
        flag: that it was given by.
        path: of the file; None: there is none.

    Raises:
        ConfigError: it is a folder, or it or its folder cannot be written.
    """
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}; give a file that can be written") from None
    if path.is_dir():
        raise ConfigError(f"{flag} {path}: is a folder; give a file that can be written")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{flag} {path}: cannot be written; give a file that can be")
