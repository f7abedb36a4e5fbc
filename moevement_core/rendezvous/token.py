"""The secret that processes of a job have in common: whoever does not know it is a stranger.

It travels in the environment or in a file that only its owner can read, never on a command line, which every user of a
host can see. What it signs says for what it was signed, so that nothing of one kind passes for another.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path

from moevement_core.errors import ConfigError

TOKEN_ENV = "MOEVEMENT_JOB_TOKEN"
TOKEN_FILE_ENV = "MOEVEMENT_JOB_TOKEN_FILE"
SHORTEST = 32
"""Characters; ``openssl rand -hex 32`` gives 64."""
MAC_BYTES = hashlib.sha256().digest_size
HOW = f"give every process of the job the same {TOKEN_ENV} (openssl rand -hex 32), or {TOKEN_FILE_ENV}"


class Token:
    """Secret of a job.

    Args:
        text: at least :data:`SHORTEST` characters that nobody can guess.

    Raises:
        ConfigError: it is too short.
    """

    def __init__(self, text: str) -> None:
        if len(text) < SHORTEST:
            raise ConfigError(
                f"a job token of {len(text)} characters; needs {SHORTEST} or more, as from openssl rand -hex 32"
            )
        self.text = text
        self._key = text.encode()

    def mac(self, purpose: str, *parts: bytes) -> bytes:
        """HMAC-SHA256 of ``parts``, each with its length, so that no two lists have the same."""
        made = hmac.new(self._key, purpose.encode() + b"\0", hashlib.sha256)
        for part in parts:
            made.update(len(part).to_bytes(8, "big") + part)
        return made.digest()

    def verifies(self, mac: bytes, purpose: str, *parts: bytes) -> bool:
        """Return whether ``mac`` was made from these parts."""
        return hmac.compare_digest(mac, self.mac(purpose, *parts))

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for the processes of the job that this one starts."""
        return {TOKEN_ENV: self.text}

    def __repr__(self) -> str:
        return "Token(...)"

    @staticmethod
    def new() -> Token:
        """Return a token that no other job has."""
        return Token(secrets.token_hex(32))


_own: Token | None = None


def given_token() -> Token | None:
    """The token that this process was given; None without one.

    The variable is taken out of the environment, where whatever records it would write it down.

    Raises:
        ConfigError: the token is too short, or its file is not this user's alone.
    """
    global _own
    if (text := os.environ.pop(TOKEN_ENV, None)) is not None:
        _own = Token(text.strip())
    elif _own is None and (path := os.environ.get(TOKEN_FILE_ENV)):
        _own = Token(_read(Path(path)))
    return _own


def own_token() -> Token:
    """The token that this process was given.

    Raises:
        ConfigError: it was given none that can be used.
    """
    if (token := given_token()) is None:
        raise ConfigError(f"no job token; {HOW}")
    return token


def _read(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise ConfigError(f"{TOKEN_FILE_ENV} {path}: no regular file; needs one of mode 0600")
            if found.st_uid != os.getuid():
                raise ConfigError(f"{TOKEN_FILE_ENV} {path}: of user {found.st_uid}; needs one of user {os.getuid()}")
            if stat.S_IMODE(found.st_mode) & 0o077:
                mode = f"{stat.S_IMODE(found.st_mode):04o}"
                raise ConfigError(f"{TOKEN_FILE_ENV} {path}: has mode {mode}, so others read it; chmod 600 {path}")
            return file.read(4096).strip()
    except OSError as error:
        raise ConfigError(f"{TOKEN_FILE_ENV} {path}: {error.strerror}; {HOW}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{TOKEN_FILE_ENV} {path}: is no text; {HOW}") from None
