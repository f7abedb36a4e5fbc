"""Job token: the secret with which the processes of a job authenticate each other.

A process gets the token in its environment or in a file that only its owner can read. It is never on a command line,
which every user of a host can see. Each MAC covers its purpose, so an attacker cannot reuse it for another purpose.
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
"""Number of characters of the shortest valid token; ``openssl rand -hex 32`` gives 64."""
MAC_BYTES = hashlib.sha256().digest_size
HOW = f"give every process of the job the same {TOKEN_ENV} (openssl rand -hex 32), or {TOKEN_FILE_ENV}"


class Token:
    """Token of a job.

    Args:
        text: at least :data:`SHORTEST` random characters.

    Raises:
        ConfigError: the text is too short.
    """

    def __init__(self, text: str) -> None:
        if len(text) < SHORTEST:
            raise ConfigError(
                f"job token has {len(text)} characters; needs {SHORTEST} or more, as openssl rand -hex 32 prints"
            )
        self.text = text
        self._key = text.encode()

    def mac(self, purpose: str, *parts: bytes) -> bytes:
        """Return the HMAC-SHA256 of a purpose and ``parts``.

        The MAC also covers the length of each part, so that no two lists of parts give the same bytes to sign.
        """
        hashing = hmac.new(self._key, purpose.encode() + b"\0", hashlib.sha256)
        for part in parts:
            hashing.update(len(part).to_bytes(8, "big") + part)
        return hashing.digest()

    def verifies(self, mac: bytes, purpose: str, *parts: bytes) -> bool:
        """Return True if ``mac`` is the MAC of the purpose and ``parts``."""
        return hmac.compare_digest(mac, self.mac(purpose, *parts))

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with the token, for processes of the job that this process starts."""
        return {TOKEN_ENV: self.text}

    def __repr__(self) -> str:
        return "Token(...)"

    @staticmethod
    def new() -> Token:
        """Return a new random token."""
        return Token(secrets.token_hex(32))


_own: Token | None = None


def given_token() -> Token | None:
    """Return the token from this process's environment, or from the file that a variable names; None without a token.

    The function removes the variable with the token from the environment, because some tools record environments. Later
    calls return the same token.

    Raises:
        ConfigError: the token is too short, or other users can read its file.
    """
    global _own
    if (text := os.environ.pop(TOKEN_ENV, None)) is not None:
        _own = Token(text.strip())
    elif _own is None and (path := os.environ.get(TOKEN_FILE_ENV)):
        _own = Token(_read(Path(path)))
    return _own


def own_token() -> Token:
    """Return the result of :func:`given_token`, for processes that cannot work without a token.

    Raises:
        ConfigError: there is no valid token.
    """
    if (token := given_token()) is None:
        raise ConfigError(f"no job token; {HOW}")
    return token


def _read(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{TOKEN_FILE_ENV} {path}: not a regular file; needs a file of mode 0600")
            if status.st_uid != os.getuid():
                raise ConfigError(f"{TOKEN_FILE_ENV} {path}: belongs to user {status.st_uid}; needs user {os.getuid()}")
            if stat.S_IMODE(status.st_mode) & 0o077:
                mode = f"{stat.S_IMODE(status.st_mode):04o}"
                raise ConfigError(f"{TOKEN_FILE_ENV} {path}: mode {mode} lets others read it; run chmod 600 {path}")
            return file.read(4096).strip()
    except OSError as error:
        raise ConfigError(f"{TOKEN_FILE_ENV} {path}: {error.strerror}; {HOW}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{TOKEN_FILE_ENV} {path}: is not a text file; {HOW}") from None
