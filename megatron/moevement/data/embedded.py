"""Byte-level token files of the embedded corpus: the same text on every machine, without a download.

The first process builds the files in a cache. Other processes that need the files at the same time wait. The text is
stored beside the token files.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from megatron.moevement.data import corpus
from megatron.moevement.data.token_files import BYTE_VOCAB_SIZE, ByteTokenizer, build_token_files
from moevement_core import log

VOCAB_SIZE = BYTE_VOCAB_SIZE
SPLIT = "95,4,1"
FORMAT = 2
"""Version in the path of the cache. Raise it whenever the text or the token files change."""


def cache_dir() -> Path:
    """Return ``$MOEVEMENT_CACHE``, or else ``moevement`` in the user's cache folder."""
    if own := os.environ.get("MOEVEMENT_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moevement"


def corpus_path() -> Path:
    """Return the path of the embedded corpus for ``--data-path``; the files need not exist yet."""
    return cache_dir() / "corpus" / f"v{FORMAT}" / "sentences"


def corpus_prefix() -> Path:
    """Return the path of the embedded corpus for ``--data-path``, and build the files first if they are missing.

    All processes of a job may call it at the same time.
    """
    prefix = corpus_path()
    if not prefix.with_suffix(".idx").exists():
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with open(prefix.parent / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not prefix.with_suffix(".idx").exists():
                log.info("building the embedded corpus; later jobs reuse it")
                text = prefix.with_suffix(".txt")
                text.write_text("\n".join(corpus.documents()), encoding="utf-8")
                build_token_files([text], prefix, ByteTokenizer(), documents="paragraph")
    return prefix
