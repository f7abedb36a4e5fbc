"""``moevement data build``: inputs that are no text, and outputs that cannot be."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from tests.bad_input.command import Row, check, table

BUILD = "data build {text} --output"


@table(
    Row("data build {cut} --output {folder}/out", ["cut.txt.gz: cut off or damaged"]),
    Row("data build {garbled} --output {folder}/out", ["garbled.txt.gz: "]),
    Row("data build {no_gzip} --output {folder}/out", ["no_gzip.txt.gz: cannot be read"]),
    Row("data build {empty} --output {folder}/out", ["the inputs hold no text"]),
    Row("data build {folder}/none.txt --output {folder}/out", ["no such file or folder"]),
    Row("data build {lines} --output {folder}/out", ["lines.jsonl, line 1: not JSON"]),
    Row("data build {bytes} --output {folder}/out", ["bytes.jsonl, line 1: not JSON"]),
    Row("data build {text} --output {folder}/out --tokenizer {folder}", ["Megatron cannot load it"]),
    Row("data build {text} --output {folder}/out --tokenizer {folder}/none", ["no such file or folder"]),
    Row(BUILD, ["--output '.': no name for files"], more=("",)),
    Row(f"{BUILD} .", ["--output '.': no name for files"]),
    Row(f"{BUILD} /", ["--output '/': no name for files"]),
    Row(f"{BUILD} {{folder}}", ["no name for files"]),
    Row(f"{BUILD} {{text}}/out", ["its folder cannot be made"]),
    Row(f"{BUILD} /proc/out", ["/proc/out: cannot be written"]),
    Row(f"{BUILD} {{folder}}/{'x' * 300}", ["File name too long"]),
    Row("data build {folder}/nothing --output {folder}/out", ["no text in this folder"]),
    Row("data", ["required"]),
)
def test_data(row: Row, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    packed = gzip.compress(os.urandom(4096))
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
