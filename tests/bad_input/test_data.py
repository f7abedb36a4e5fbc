"""Inputs of ``moevement data build`` that are no text, and outputs that cannot be written."""

from __future__ import annotations

import errno
import gzip
import random
from pathlib import Path

import pytest

from tests.bad_input.command import Reason, Row, check, table

BUILD = "data build {text} --output"
LONG = "x" * 300


@table(
    Row("data build {cut} --output {folder}/out", ["{cut}", "end-of-stream"]),
    Row("data build {garbled} --output {folder}/out", ["{garbled}", "CRC"]),
    Row("data build {no_gzip} --output {folder}/out", ["{no_gzip}", "b'so'"]),
    Row("data build {empty} --output {folder}/out", ["no text"]),
    Row("data build {folder}/none.txt --output {folder}/out", ["{folder}/none.txt", "no such"]),
    Row("data build {lines} --output {folder}/out", ["{lines}", "line 1", "JSON", "column 1"]),
    Row("data build {bytes} --output {folder}/out", ["{bytes}", "line 1", "JSON", "0x0a"]),
    Row("data build {text} --output {folder}/out --tokenizer {folder}", ["{folder}", "HuggingFaceTokenizer"]),
    Row("data build {text} --output {folder}/out --tokenizer {folder}/none", ["{folder}/none", "tokenizer.json"]),
    Row(BUILD, ["--output", "'.'"], more=("",)),
    Row(f"{BUILD} .", ["--output", "'.'"]),
    Row(f"{BUILD} /", ["--output", "'/'"]),
    Row(f"{BUILD} {{folder}}", ["--output", "'{folder}'"]),
    Row(f"{BUILD} {{text}}/out", ["{text}/out", Reason(errno.EEXIST)]),
    Row(f"{BUILD} /proc/out", ["/proc/out", Reason(errno.ENOENT)]),
    Row(f"{BUILD} {{folder}}/{LONG}", ["{folder}", Reason(errno.ENAMETOOLONG)]),
    Row("data build {folder}/nothing --output {folder}/out", ["{folder}/nothing", ".jsonl.gz"]),
    Row("data", ["ACTION"]),
)
def test_data(row: Row, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    packed = gzip.compress(random.Random(1).randbytes(4096), mtime=0)
    files = {
        "cut.txt.gz": packed[:2000], "garbled.txt.gz": packed[:50] + bytes(100) + packed[150:],
        "no_gzip.txt.gz": b"some text", "empty.txt": b"", "lines.jsonl": b'{"text": "a"\n',
        "bytes.jsonl": b"\xff\xfe\n", "text.txt": b"some text\n",
    }  # fmt: skip
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "nothing").mkdir()
    places = {name.partition(".")[0]: tmp_path / name for name in files}
    check(row, capfd, monkeypatch, folder=tmp_path, **places)
