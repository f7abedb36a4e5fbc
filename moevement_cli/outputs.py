"""Check of output files before a command begins its work, so that the results of the work are not lost."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from moevement_core.errors import ConfigError


def check_output(flag: str, path: Path | None, suffixes: Sequence[str] = ()) -> None:
    """Create the parent folders of an output file, and raise an error if the file cannot be written.

    Args:
        flag: flag that names the file.
        path: path of the file. None: the user wants no file.
        suffixes: suffixes that the name may have. Empty: any.

    Raises:
        ConfigError: the suffix is wrong, the path is a folder, the file or its folder cannot be written, or the
            top-level folder of the path does not exist. A missing top-level folder is usually a typing error, and
            creating it would put a folder at the root of the disk.
    """
    if path is None:
        return
    if suffixes and path.suffix not in suffixes:
        raise ConfigError(
            f"{flag} {path} is a {path.suffix or 'name without suffix'}; give a file that ends in {', '.join(suffixes)}"
        )
    absolute = path.absolute()
    if absolute.parent != Path("/") and not Path(*absolute.parts[:2]).is_dir():
        raise ConfigError(
            f"{flag} {path}: folder {Path(*absolute.parts[:2])} does not exist; give a file in a folder that exists"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}; give a file that can be written") from None
    if path.is_dir():
        raise ConfigError(f"{flag} {path} is a folder; give a file that can be written")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{flag} {path} cannot be written; give a file that can be written")
