"""Files that a command writes at its end, looked at before its work is done."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from moevement_core.errors import ConfigError


def check_output(flag: str, path: Path | None, suffixes: Sequence[str] = ()) -> None:
    """Raise if a file cannot be written; its folders are made.

    Args:
        flag: that it was given by.
        path: of the file; None: there is none.
        suffixes: that its name may have; empty: any.

    Raises:
        ConfigError: its name has another suffix, it is a folder, it or its folder cannot be written, or the first of
            its folders is not there: a slip, which would make folders at the root of the disk.
    """
    if path is None:
        return
    if suffixes and path.suffix not in suffixes:
        raise ConfigError(f"{flag} {path}: a {path.suffix or 'name without suffix'}; needs {', '.join(suffixes)}")
    absolute = path.absolute()
    if absolute.parent != Path("/") and not Path(*absolute.parts[:2]).is_dir():
        raise ConfigError(f"{flag} {path}: no folder {Path(*absolute.parts[:2])}; give a file in a folder that exists")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}; give a file that can be written") from None
    if path.is_dir():
        raise ConfigError(f"{flag} {path}: is a folder; give a file that can be written")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{flag} {path}: cannot be written; give a file that can be")
