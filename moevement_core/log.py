"""The log of a rank: one logger for all that this project says in it, level and rank in every line.

``MOEVEMENT_LOG=json`` writes JSON lines instead, for collectors of logs. Nothing has to be configured; whoever wants
something else sets handlers of ``logging.getLogger("moevement")`` before the first line.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from typing import override

FORMAT_ENV = "MOEVEMENT_LOG"
"""``text`` (default) or ``json``."""
NAME = "moevement"
PREFIXES = (f"{NAME}: ", f'{{"{NAME}": ')
"""Beginnings of this project's lines among those of Megatron and of libraries, as text and as JSON."""


class _Text(logging.Formatter):
    @override
    def format(self, record: logging.LogRecord) -> str:
        return f"{NAME}: {record.levelname} rank {_rank()}: {record.getMessage()}"


class _Json(logging.Formatter):
    @override
    def format(self, record: logging.LogRecord) -> str:
        rank = _rank()
        return json.dumps(
            {
                NAME: record.getMessage(), "level": record.levelname, "rank": int(rank) if rank.isdigit() else None,
                "time": time.time(),
            }
        )  # fmt: skip


class _Stdout(logging.StreamHandler):
    """Handler that writes to the current ``sys.stdout``: ranks are forked, and their output is redirected then."""

    def __init__(self) -> None:
        super().__init__(sys.stdout)

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stdout
        super().emit(record)


def _rank() -> str:
    """This process's rank, which may be another one after a failure; ``-`` before it has one."""
    return os.environ.get("RANK", "-")


def get() -> logging.Logger:
    """Returns the logger; from any thread."""
    logger = logging.getLogger(NAME)
    if not logger.handlers:
        handler = _Stdout()
        handler.setFormatter(_Json() if os.environ.get(FORMAT_ENV, "text") == "json" else _Text())
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    return logger


def message_of(line: str) -> str:
    """Return what a line of this project says, without the name of the project, level and rank."""
    if line.startswith(PREFIXES[1]):
        return str(json.loads(line)[NAME])
    return re.sub(rf"^{NAME}: (?:[A-Z]+ rank \S+: )?", "", line)


def info(text: str) -> None:
    """Log something that an operator may want to know."""
    get().info(text)


def warning(text: str) -> None:
    """Log something that an operator should know, and may have to act on."""
    get().warning(text)
