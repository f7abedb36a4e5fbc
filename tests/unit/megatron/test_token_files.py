"""Token files hold the text that they were built from, and a build that fails leaves no file behind."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest

from megatron.moevement.data import corpus, embedded
from megatron.moevement.data.token_files import ByteTokenizer, DocumentUnit, FileTokenizer, build_token_files
from moevement_cli.main import main
from moevement_core.errors import DataError


def documents(prefix: Path) -> list[list[int]]:
    """Return the token ids of each document."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    data = IndexedDataset(str(prefix))
    starts = data.document_indices
    return [np.concatenate([data[i] for i in range(starts[d], starts[d + 1])]).tolist() for d in range(len(starts) - 1)]


def test_bytes_come_back(tmp_path: Path) -> None:
    text = "Größe 你好\n\nline two".encode() + b"\xff\x00"
    (tmp_path / "a.txt").write_bytes(text)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"second"))
    (tmp_path / "empty.txt").write_bytes(b"")
    written = build_token_files(
        [tmp_path / "a.txt", tmp_path / "empty.txt", tmp_path / "b.txt.gz"], tmp_path / "out" / "x", ByteTokenizer()
    )
    assert documents(tmp_path / "out" / "x") == [[*text, 256], [*b"second", 256]]
    assert (written.documents, written.tokens) == (2, len(text) + len(b"second") + 2)
    assert json.loads((tmp_path / "out" / "x.json").read_text())["train_flags"][1] == "NullTokenizer"


@pytest.mark.parametrize(
    ("unit", "expected"),
    [("file", [b"a\nb\n\n\nc\n"]), ("line", [b"a\n", b"b\n", b"c\n"]), ("paragraph", [b"a\nb\n", b"c\n"])],
)
def test_documents_are_files_lines_or_paragraphs(unit: DocumentUnit, expected: list[bytes], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a\nb\n\n\nc\n")
    build_token_files([tmp_path / "a.txt"], tmp_path / "x", ByteTokenizer(), documents=unit)
    assert documents(tmp_path / "x") == [[*piece, 256] for piece in expected]


def test_a_long_document_is_one_document_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.moevement.data.token_files.CHUNK_BYTES", 8)
    text = b"".join(b"line %d\n" % i for i in range(20))
    (tmp_path / "a.txt").write_bytes(text)
    build_token_files([tmp_path / "a.txt"], tmp_path / "x", ByteTokenizer())
    assert documents(tmp_path / "x") == [[*text, 256]]


def test_json_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n\n{"body": "two"}\n')
    build_token_files([tmp_path / "a.jsonl"], tmp_path / "x", ByteTokenizer(), json_key="body")
    assert documents(tmp_path / "x") == [[*b"one", 256], [*b"two", 256]]
    with pytest.raises(DataError, match=r"\ba\.jsonl\b.*\bline 1\b.*'text'.*--json-key\b"):
        build_token_files([tmp_path / "a.jsonl"], tmp_path / "y", ByteTokenizer())
    (tmp_path / "a.jsonl").write_text("{")
    with pytest.raises(DataError, match=r"\ba\.jsonl\b.*\bline 1\b.*\bJSON\b"):
        build_token_files([tmp_path / "a.jsonl"], tmp_path / "y", ByteTokenizer())


def test_nothing_is_left_of_a_build_that_failed(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("text")
    out = tmp_path / "out"
    with pytest.raises(DataError, match=r"\bmissing\.txt\b"):
        build_token_files([tmp_path / "good.txt", tmp_path / "missing.txt"], out / "x", ByteTokenizer())
    assert list(out.iterdir()) == []
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match="no text"):
        build_token_files([tmp_path / "empty.txt"], out / "x", ByteTokenizer())
    assert list(out.iterdir()) == []


@pytest.fixture
def hugging_face_tokenizer(tmp_path: Path) -> Path:
    """Train a byte-pair tokenizer on a few lines, and return its folder, which has the layout of the hub."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<eos>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(["the model trains and the rank dies"] * 20, trainer)
    folder = tmp_path / "tokenizer"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ["", "tokenizer.json"])
def test_a_hugging_face_tokenizer(name: str, hugging_face_tokenizer: Path, tmp_path: Path) -> None:
    text = "the rank trains"
    (tmp_path / "a.txt").write_text(text)
    tokenizer = FileTokenizer(hugging_face_tokenizer / name)
    written = build_token_files([tmp_path / "a.txt"], tmp_path / "x", tokenizer)
    (ids,) = documents(tmp_path / "x")
    assert ids[-1] == tokenizer.end_of_document
    assert len(ids) < len(text)
    assert written.train_flags[:2] == ["--tokenizer-type", "HuggingFaceTokenizer"]
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match=r"\blatin\.txt\b.*\b0xe9\b.*--tokenizer\b"):
        build_token_files([tmp_path / "latin.txt"], tmp_path / "y", tokenizer)


def test_a_sentencepiece_tokenizer(tmp_path: Path) -> None:
    import sentencepiece

    lines = tmp_path / "lines.txt"
    lines.write_text("the model trains and the rank dies\na spare takes its place\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(lines), model_prefix=str(tmp_path / "sp"), vocab_size=24, minloglevel=2
    )
    tokenizer = FileTokenizer(tmp_path / "sp.model")
    (tmp_path / "a.txt").write_text("the spare trains")
    build_token_files([tmp_path / "a.txt"], tmp_path / "x", tokenizer)
    (ids,) = documents(tmp_path / "x")
    assert ids[-1] == tokenizer.end_of_document
    assert max(ids) < tokenizer.vocab_size


def test_a_tokenizer_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"/none\b.*\btokenizer\.json\b"):
        FileTokenizer(tmp_path / "none")
    (tmp_path / "bad.model").write_text("not a model")
    with pytest.raises(DataError, match=r"/bad\.model\b.*\bSentencePieceTokenizer\b"):
        FileTokenizer(tmp_path / "bad.model")


def test_the_embedded_corpus_is_built_once_and_holds_every_document(embedded_corpus: Path) -> None:
    assert documents(embedded_corpus) == [[*text.encode(), 256] for text in corpus.documents()]
    written = embedded_corpus.with_suffix(".bin").stat().st_mtime_ns
    assert embedded.corpus_prefix() == embedded_corpus
    assert embedded_corpus.with_suffix(".bin").stat().st_mtime_ns == written


def test_the_embedded_corpus_has_the_same_bytes_on_every_machine() -> None:
    text = "\n".join(corpus.documents())
    assert len(text) == 193_649
    assert hashlib.sha256(text.encode()).hexdigest() == (
        "3925925dc5ba30f4799051d44de3d48633ba06683e7a5a124d67ca91579e8e8a"
    )


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("text")
    (tmp_path / "in" / "b.bin").write_text("not text")
    assert main(["data", "build", str(tmp_path / "in"), "--output", str(tmp_path / "x"), "--json"]) == 0
    out = capsys.readouterr().out
    assert json.loads(out.splitlines()[-1])["tokens"] == 5
    assert "--vocab-size 257" in out
    for words, named in (
        (["data", "build", str(tmp_path / "in"), "--output", str(tmp_path / "x")], r"/x\.idx\b.*--overwrite\b"),
        (["data", "build", str(tmp_path / "none"), "--output", str(tmp_path / "y")], r"/none\b"),
        (["data", "build", str(tmp_path / "in"), "--output", str(tmp_path / "y.bin")], r"/y\.bin\b.*/y\b(?!\.)"),
        (["data", "build"], r"\bINPUT\b.*--output\b"),
        (["verify", str(tmp_path), str(tmp_path / "none")], r"\bsummary\.json\b"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == 2
        error = capsys.readouterr().err
        assert re.search(named, error)
        assert error.count("\n") == 1
    assert main(["data", "build", str(tmp_path / "in"), "--output", str(tmp_path / "x"), "--overwrite"]) == 0
