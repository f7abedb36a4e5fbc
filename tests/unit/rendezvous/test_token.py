"""Job token: its sources, the values that are refused, and what it signs."""

from __future__ import annotations

import errno
import os
import re
import socket
import threading
from pathlib import Path

import pytest

from moevement_cli.main import main
from moevement_core.comms import token as tokens
from moevement_core.comms.signed_server import SignedServer
from moevement_core.comms.token import TOKEN_ENV, TOKEN_FILE_ENV, Token, given_token, own_token
from moevement_core.errors import ConfigError
from moevement_core.launching import supervise

TEXT = "a" * 40


@pytest.fixture(autouse=True)
def _nothing_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_own", None)
    for name in (TOKEN_ENV, TOKEN_FILE_ENV):
        monkeypatch.delenv(name, raising=False)


def test_the_variable_is_taken_out_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_ENV, TEXT)
    assert own_token().text == TEXT
    assert TOKEN_ENV not in os.environ
    assert own_token().text == TEXT
    assert TEXT not in repr(own_token())


def test_a_process_without_one_is_told_what_to_do() -> None:
    assert given_token() is None
    with pytest.raises(ConfigError, match=rf"^(?!{TOKEN_FILE_ENV}).*\btoken\b.*\b{TOKEN_ENV}\b.*\b{TOKEN_FILE_ENV}\b"):
        own_token()


def test_a_file_of_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TEXT}\n")
    monkeypatch.setenv(TOKEN_FILE_ENV, str(path))
    for mode in (0o640, 0o604, 0o620):
        path.chmod(mode)
        with pytest.raises(ConfigError, match=rf"{re.escape(str(path))}\b.*\b{mode:04o}\b.*\bchmod 600\b"):
            own_token()
    path.chmod(0o400)
    assert own_token().text == TEXT


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to give a file away")
def test_a_file_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "token"
    path.write_text(TEXT)
    path.chmod(0o600)
    os.chown(path, 12345, 0)
    monkeypatch.setenv(TOKEN_FILE_ENV, str(path))
    with pytest.raises(ConfigError, match=rf"{re.escape(str(path))}\b.*\buser 12345\b.*\buser 0\b"):
        own_token()


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        (None, rf"\b{TOKEN_FILE_ENV}\b.*{os.strerror(errno.ENOENT)}"),
        (b"short", r"\b5 characters\b.*\b32\b"),
        (b"\xff" * 40, rf"\b{TOKEN_FILE_ENV}\b.*\btext\b"),
    ],
)
def test_a_file_without_a_token(
    content: bytes | None, pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
        path.chmod(0o600)
    monkeypatch.setenv(TOKEN_FILE_ENV, str(path))
    with pytest.raises(ConfigError, match=pattern):
        own_token()


def test_what_is_signed_for_one_purpose_is_of_no_use_for_another() -> None:
    token = Token(TEXT)
    mac = token.mac("value", b"ab", b"c")
    assert token.verifies(mac, "value", b"ab", b"c")
    assert not token.verifies(mac, "value", b"a", b"bc")
    assert not token.verifies(mac, "lease", b"ab", b"c")
    assert not Token.new().verifies(mac, "value", b"ab", b"c")


@pytest.mark.parametrize("text", [None, "b" * 40])
def test_a_supervisor_that_is_none_of_the_job_says_so_and_ends_with_two(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    server = SignedServer(listener, Token(TEXT), lambda caller, message: None, lambda caller: None)
    threading.Thread(target=server.poll, args=(10.0,), daemon=True).start()
    port = listener.getsockname()[1]
    script = tmp_path / "train.py"
    script.touch()
    monkeypatch.setattr(supervise, "TOKEN_PATIENCE_S", 0.2)
    monkeypatch.setenv("MOEVEMENT_STORE", f"127.0.0.1:{port}")
    for name, value in (("SLURM_PROCID", "0"), ("SLURM_NTASKS", "3"), ("SLURM_LOCALID", "0")):
        monkeypatch.setenv(name, value)
    if text is not None:
        monkeypatch.setenv(TOKEN_ENV, text)
    with pytest.raises(SystemExit, match="2"):
        main(["launch", "--trainer", "torch", "--spares", "1", str(script)])
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(rf"^moevement: .*\btoken\b.*\b{TOKEN_ENV}\b", line)
    assert (f"MOEVEMENT_STORE=127.0.0.1:{port} " in line) == (text is not None)


def test_a_coordinator_whose_tasks_others_start_needs_a_token(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["coordinate", "--ranks", "2"])
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(rf"^moevement: .*\btoken\b.*\b{TOKEN_ENV}\b", line)
