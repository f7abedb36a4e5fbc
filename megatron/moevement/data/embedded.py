"""Real text on every machine, without a download: the sources of Python's standard library, byte-level.

About a dozen megabytes of code, comments and documentation strings. Built once per Python version into a cache; ranks
that want it at the same time wait for the one that builds it.
"""

from __future__ import annotations

import fcntl
import os
import platform
import sysconfig
from pathlib import Path

from megatron.moevement.data.token_files import BYTE_VOCAB_SIZE, ByteTokenizer, build_token_files
from moevement_core import log

VOCAB_SIZE = BYTE_VOCAB_SIZE
SPLIT = "95,4,1"
FORMAT = 1
"""Part of the cache's name; raised whenever the same sources would give other token files."""

_LEFT_OUT = {"site-packages", "test", "tests", "idle_test", "__pycache__", "pydoc_data", "turtledemo"}


def cache_dir() -> Path:
    """``$MOEVEMENT_CACHE``, else ``moevement`` in the user's cache folder."""
    if own := os.environ.get("MOEVEMENT_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moevement"


def corpus_path() -> Path:
    """Where the corpus of this Python version stands or will stand, as a prefix for ``--data-path``."""
    return cache_dir() / "corpus" / f"python-{platform.python_version()}-v{FORMAT}" / "stdlib"


def corpus_prefix() -> Path:
    """The corpus as a prefix for ``--data-path``; built first if it is not there. Any process may call it."""
    prefix = corpus_path()
    if not prefix.with_suffix(".idx").exists():
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with open(prefix.parent / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not prefix.with_suffix(".idx").exists():
                log.info("building the embedded corpus, once")
                build_token_files(stdlib_sources(), prefix, ByteTokenizer())
    return prefix


def stdlib_sources() -> list[Path]:
    """The standard library's source files, sorted by path, without its tests and without empty files."""
    root = Path(sysconfig.get_paths()["stdlib"])
    sources = (path for path in root.rglob("*.py") if not _LEFT_OUT & set(path.relative_to(root).parts))
    return sorted(path for path in sources if path.stat().st_size)
