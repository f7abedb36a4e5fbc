"""Conversion of text files to the ``.bin``/``.idx`` pair that Megatron's ``GPTDataset`` reads.

The default is byte-level: a token is a byte of the text (0 to 255), and :data:`END_OF_DOCUMENT` closes every document.
Megatron's ``NullTokenizer`` with ``--vocab-size 257`` reads these tokens, so no tokenizer file is needed.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal, Protocol

import numpy as np
import torch

from megatron.moevement.quiet_imports import quiet_imports
from moevement_core.errors import DataError

END_OF_DOCUMENT = 256
BYTE_VOCAB_SIZE = 257
CHUNK_BYTES = 16 << 20
"""Size in bytes above which a document is split into several sequences at line ends, to bound memory."""

DocumentUnit = Literal["file", "line", "paragraph"]


class Tokenizer(Protocol):
    """Converter of text into token ids."""

    vocab_size: int
    end_of_document: int
    train_flags: list[str]
    """Flags with which Megatron reads the output of this tokenizer."""

    def encode(self, text: bytes) -> np.ndarray:
        """Return the token ids of ``text`` (UTF-8), one-dimensional."""


class ByteTokenizer:
    """Tokenizer whose tokens are bytes."""

    vocab_size = BYTE_VOCAB_SIZE
    end_of_document = END_OF_DOCUMENT

    def __init__(self) -> None:
        self.train_flags = ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(BYTE_VOCAB_SIZE)]

    def encode(self, text: bytes) -> np.ndarray:
        """Return the bytes themselves as ids."""
        return np.frombuffer(text, dtype=np.uint8)


class FileTokenizer:
    """Tokenizer from a Hugging Face folder, a ``tokenizer.json`` or a SentencePiece ``.model``."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            raise DataError(f"tokenizer {path}: no such file or folder; give a tokenizer.json, its folder or a .model")
        is_sentencepiece = path.suffix == ".model"
        kind = "SentencePieceTokenizer" if is_sentencepiece else "HuggingFaceTokenizer"
        model = path if is_sentencepiece or path.is_dir() else path.parent
        with quiet_imports():
            from megatron.core.tokenizers import MegatronTokenizer

        library = "sentencepiece" if is_sentencepiece else "huggingface"
        try:
            self._tokenizer = MegatronTokenizer.from_pretrained(
                tokenizer_path=str(model), metadata_path={"library": library}
            )
            self.end_of_document = int(self._tokenizer.eod)
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise DataError(f"tokenizer {path}: Megatron cannot load it as {kind}: {reason}") from error
        self.vocab_size = int(self._tokenizer.vocab_size)
        self.train_flags = ["--tokenizer-type", kind, "--tokenizer-model", str(model)]

    def encode(self, text: bytes) -> np.ndarray:
        """Return the token ids of ``text`` (UTF-8), int64."""
        return np.asarray(self._tokenizer.tokenize(text.decode("utf-8")), dtype=np.int64)


@dataclass(frozen=True)
class TokenFiles:
    """Summary of written token files, with the flags for training on them. ``PREFIX.json`` holds this summary."""

    prefix: str
    documents: int
    tokens: int
    vocab_size: int
    train_flags: list[str]


def build_token_files(
    inputs: Iterable[Path],
    prefix: Path,
    tokenizer: Tokenizer,
    *,
    documents: DocumentUnit = "file",
    json_key: str = "text",
    on_bytes: Callable[[int], None] = lambda nbytes: None,
) -> TokenFiles:
    """Write ``prefix.bin`` and ``prefix.idx``. The files get these names only when both are complete.

    Args:
        inputs: text files, or ``.jsonl`` with one document per line under ``json_key``; either may end in ``.gz``.
        prefix: path without suffix; the function creates its folder.
        tokenizer: converter of text into token ids.
        documents: unit of a text file that becomes one document; ignored for ``.jsonl``.
        json_key: key of the text in a line of ``.jsonl``.
        on_bytes: function that receives the number of input bytes after each read.

    Raises:
        DataError: an input is unreadable, an input is not UTF-8 but the tokenizer needs UTF-8, all inputs are empty, or
            the output is not writable.
    """
    with quiet_imports():
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    if not prefix.name:
        raise DataError(f"output {str(prefix)!r} has no file name; give a path with a name and without suffix")
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{prefix}: the folder cannot be created ({error.strerror}); give another path") from None
    partial = prefix.with_name(f".{prefix.name}.{os.getpid()}.partial")
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    written_documents = written_tokens = 0
    try:
        builder = IndexedDatasetBuilder(f"{partial}.bin", dtype=dtype)
        for path in inputs:
            for chunk, is_last in _pieces(path, documents, json_key, on_bytes):
                ids = _encode(tokenizer, chunk, path)
                if is_last:
                    ids = np.append(ids, tokenizer.end_of_document)
                builder.add_item(torch.from_numpy(ids.astype(dtype)))
                written_tokens += len(ids)
                if is_last:
                    builder.end_document()
                    written_documents += 1
        if not written_documents:
            raise DataError("the inputs hold no text; give at least one file that is not empty")
        builder.finalize(f"{partial}.idx")
        summary = TokenFiles(
            prefix=prefix.name,
            documents=written_documents,
            tokens=written_tokens,
            vocab_size=tokenizer.vocab_size,
            train_flags=list(tokenizer.train_flags),
        )
        Path(f"{partial}.json").write_text(json.dumps(asdict(summary), indent=2) + "\n", encoding="utf-8")
        # The .idx file comes last, because Megatron considers a prefix with an .idx file complete.
        for suffix in (".json", ".bin", ".idx"):
            os.replace(f"{partial}{suffix}", f"{prefix}{suffix}")
    except OSError as error:
        raise DataError(f"{prefix}: the files cannot be written ({error.strerror}); give another path") from None
    finally:
        for suffix in (".json", ".bin", ".idx"):
            Path(f"{partial}{suffix}").unlink(missing_ok=True)
    return summary


def _encode(tokenizer: Tokenizer, text: bytes, path: Path) -> np.ndarray:
    try:
        return tokenizer.encode(text)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: byte {error.object[error.start]:#04x} is not UTF-8 text; convert the file, or leave out "
            "--tokenizer to train on bytes"
        ) from None


def _pieces(
    path: Path, documents: DocumentUnit, json_key: str, on_bytes: Callable[[int], None]
) -> Iterator[tuple[bytes, bool]]:
    """Yield pieces of documents, and for each piece True if it is the last piece of a document."""
    is_json = path.name.removesuffix(".gz").endswith(".jsonl")
    try:
        with _open(path) as file:
            if is_json:
                yield from _json_documents(path, file, json_key, on_bytes)
            elif documents == "file":
                yield from _whole_file(file, on_bytes)
            else:
                yield from _lines_or_paragraphs(file, documents, on_bytes)
    except OSError as error:
        raise DataError(f"{path}: the file cannot be read ({error.strerror or error})") from None
    except (EOFError, zlib.error) as error:
        raise DataError(f"{path}: the file is cut off or damaged ({error}); compress it again") from None


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def _whole_file(file: IO[bytes], on_bytes: Callable[[int], None]) -> Iterator[tuple[bytes, bool]]:
    chunk = file.read(CHUNK_BYTES)
    while chunk:
        chunk += file.readline()
        on_bytes(len(chunk))
        following = file.read(CHUNK_BYTES)
        yield chunk, not following
        chunk = following


def _lines_or_paragraphs(
    file: IO[bytes], documents: DocumentUnit, on_bytes: Callable[[int], None]
) -> Iterator[tuple[bytes, bool]]:
    paragraph: list[bytes] = []
    for line in file:
        on_bytes(len(line))
        if line.strip():
            if documents == "line":
                yield line, True
            else:
                paragraph.append(line)
        elif paragraph:
            yield b"".join(paragraph), True
            paragraph = []
    if paragraph:
        yield b"".join(paragraph), True


def _json_documents(
    path: Path, file: IO[bytes], json_key: str, on_bytes: Callable[[int], None]
) -> Iterator[tuple[bytes, bool]]:
    for number, line in enumerate(file, start=1):
        on_bytes(len(line))
        if not line.strip():
            continue
        try:
            record: Any = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}, line {number}: the line is not JSON: {error}") from None
        text = record.get(json_key) if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise DataError(f"{path}, line {number}: there is no text under {json_key!r}; give the key by --json-key")
        if text:
            yield text.encode("utf-8"), True
