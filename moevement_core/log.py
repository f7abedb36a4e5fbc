"""Log of a rank: one logger for all messages of this project, with level and rank in every line.

With ``MOEVEMENT_LOG=json`` the logger writes JSON lines, for collectors of logs. The logger needs no configuration. A
program that wants other handlers adds them to ``logging.getLogger("moevement")`` before the first message.
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
"""Variable that sets the format of the lines: ``text`` (default) or ``json``."""
NAME = "moevement"
PREFIXES = (f"{NAME}: ", f'{{"{NAME}": ')
"""Beginnings of this project's lines, as text and as JSON. Lines of other libraries begin differently."""


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
    """Handler that looks up ``sys.stdout`` for every message, because forked ranks replace that stream."""

    def __init__(self) -> None:
        super().__init__(sys.stdout)

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stdout
        super().emit(record)


def _rank() -> str:
    """Return this process's rank, which may change after a failure; ``-`` until the process has one."""
    return os.environ.get("RANK", "-")


def get() -> logging.Logger:
    """Return the logger, and configure it at the first call; any thread may call it."""
    logger = logging.getLogger(NAME)
    if not logger.handlers:
        handler = _Stdout()
        handler.setFormatter(_Json() if os.environ.get(FORMAT_ENV, "text") == "json" else _Text())
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    return logger


def message_of(line: str) -> str:
    """Return the message of a line of this project, without the project's name, level and rank."""
    if line.startswith(PREFIXES[1]):
        return str(json.loads(line)[NAME])
    return re.sub(rf"^{NAME}: (?:[A-Z]+ rank \S+: )?", "", line)


def info(text: str) -> None:
    """Log information for people who run the job."""
    get().info(text)


def warning(text: str) -> None:
    """Log a warning for people who run the job, who may have to act on it."""
    get().warning(text)
