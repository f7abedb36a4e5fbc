"""Locations of windows: a folder's path, or a URL of an object store that fsspec understands.

A URL must not hold credentials, because flags appear in logs and in run directories. fsspec finds credentials in the
environment and in its configuration files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from moevement_core.errors import ConfigError

NODE = "{node}"
"""Placeholder for a rank's node in a folder's name."""
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(?=://)")
_USER = re.compile(r"(?<=://)[^/\s]*@")
_QUERY = re.compile(r"\?[^\s'\"]*")
_SECRET = re.compile(r"key|secret|token|passw|credential|signature|sas", re.IGNORECASE)
_FEWEST_LETTERS = 6
"""Length from which a value counts as a secret; a shorter one would hide parts of ordinary words."""
_MOST_LETTERS = 300
_HIDDEN = "***"


def is_url(location: str) -> bool:
    """Return True if ``location`` is a URL, and False if it is the path of a folder."""
    return _SCHEME.match(location) is not None


def check_location(name: str, location: str | None) -> str | None:
    """Return ``location``, if it is a path, or a URL that a job can use; a check of a flag's value.

    Args:
        name: name of the flag.
        location: value of the flag; None without the flag.

    Raises:
        ConfigError: the URL holds credentials or ``{node}``, or no installed package serves its scheme.
    """
    if location is None or (scheme := _SCHEME.match(location)) is None:
        return location
    if (complaint := _exposed(location)) is not None:
        raise ConfigError(f"{name} {complaint}")
    if NODE in location or "::" in location:
        raise ConfigError(
            f"{name} {location}: a store is the same for all nodes, and has no caches in front of it; leave "
            f"{NODE} and :: out"
        )
    import fsspec  # after the checks of the text, because a job without a URL never needs it

    try:
        fsspec.get_filesystem_class(scheme[0].lower())
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{name} {location}: {without_secrets(str(error))}; give another URL, or a folder") from None
    return location


def refuse_exposed(words: Sequence[str]) -> None:
    """Refuse a command line whose URLs of windows hold credentials, before the command line is recorded.

    Args:
        words: words of the command line, with those of configuration files.

    Raises:
        ConfigError: a value of a ``--moevement-`` flag is such a URL. The message does not repeat the credentials.
    """
    for flag, value in _values(words):
        if is_url(value) and (complaint := _exposed(value)) is not None:
            raise ConfigError(f"{flag} {complaint}")


def described(error: BaseException) -> str:
    """Return the reason of a failed request in one line, without credentials."""
    if isinstance(error, OSError) and error.strerror:
        return without_secrets(error.strerror)
    if isinstance(error, FileNotFoundError):
        return "there is no such object or bucket"
    lines = str(error).strip().splitlines()
    text = without_secrets(lines[0][:_MOST_LETTERS]) if lines else ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def without_secrets(text: str) -> str:
    """Return ``text`` without user names and queries of URLs, and without secrets of the environment and of fsspec."""
    import fsspec.config

    for secret in sorted({*_secrets(os.environ), *_secrets(fsspec.config.conf)}, key=len, reverse=True):
        text = text.replace(secret, _HIDDEN)
    return _QUERY.sub(f"?{_HIDDEN}", _USER.sub(f"{_HIDDEN}@", text))


def _exposed(url: str) -> str | None:
    if not _USER.search(url) and "?" not in url and "#" not in url:
        return None
    return (
        f"{_QUERY.sub(f'?{_HIDDEN}', _USER.sub(f'{_HIDDEN}@', url)).partition('#')[0]}: a URL with a user, a query or "
        "a fragment would write credentials to logs; give credentials by environment variables or by fsspec's "
        "configuration files"
    )


def _values(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    for word in words:
        name, equals, value = word.partition("=")
        if equals and name.startswith("--moevement-"):
            yield name, value
    yield from ((name, value) for name, value in pairwise(words) if name.startswith("--moevement-"))


def _secrets(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the values whose names say that they are secrets; values may be mappings of this kind themselves."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _secrets(value)
        elif isinstance(value, str) and len(value) >= _FEWEST_LETTERS and _SECRET.search(name):
            yield value
