"""Token files of the embedded corpus, byte-level: the same text on every machine, without a download.

Built once into a cache; ranks that want it at the same time wait for the rank that builds it. The text itself stands
beside the token files.
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
"""Part of the cache's name; raised whenever the text or its token files change."""


def cache_dir() -> Path:
    """``$MOEVEMENT_CACHE``, else ``moevement`` in the user's cache folder."""
    if own := os.environ.get("MOEVEMENT_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moevement"


def corpus_path() -> Path:
    """Return where the corpus stands or will stand, as a prefix for ``--data-path``."""
    return cache_dir() / "corpus" / f"v{FORMAT}" / "sentences"


def corpus_prefix() -> Path:
    """Return the corpus as a prefix for ``--data-path``; build it first if it is not there. Any process may call it."""
    prefix = corpus_path()
    if not prefix.with_suffix(".idx").exists():
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with open(prefix.parent / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not prefix.with_suffix(".idx").exists():
                log.info("building the embedded corpus, once")
                text = prefix.with_suffix(".txt")
                text.write_text("\n".join(corpus.documents()), encoding="utf-8")
                build_token_files([text], prefix, ByteTokenizer(), documents="paragraph")
    return prefix
