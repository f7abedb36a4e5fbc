"""Command ``moevement data build``, which makes token files from text."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from moevement_core.errors import ConfigError, DataError
from moevement_core.util.extras import require
from moevement_core.util.words import counted

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl", ".txt.gz", ".jsonl.gz")


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the actions of ``moevement data`` and their arguments."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    files = actions.add_parser(
        "build",
        help="convert text files to the .bin and .idx files that --data-path reads",
        description="Write PREFIX.bin, PREFIX.idx and PREFIX.json from text or .jsonl files, which may be compressed "
        "(.gz). Without --tokenizer, each byte is a token.",
    )
    files.add_argument(
        "inputs", metavar="INPUT", nargs="+", type=Path, help="a text file, a .jsonl file, or a folder of such files"
    )
    files.add_argument(
        "--output", metavar="PREFIX", type=Path, required=True, help="path of the output files, without suffix"
    )
    files.add_argument(
        "--tokenizer",
        metavar="FILE",
        type=Path,
        help="a Hugging Face tokenizer.json or its folder, or a SentencePiece .model",
    )
    files.add_argument(
        "--documents",
        choices=("file", "line", "paragraph"),
        default="file",
        help="part of a text file that is one document (default: the whole file)",
    )
    files.add_argument("--json-key", default="text", help="key of the text in a .jsonl line (default: text)")
    files.add_argument("--overwrite", action="store_true", help="replace existing token files")
    files.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    files.set_defaults(run=build)


def build(arguments: argparse.Namespace) -> int:
    """Build the token files and return the exit code."""
    require("megatron.core", "moevement data build")
    from megatron.moevement.data.token_files import ByteTokenizer, FileTokenizer, Tokenizer, build_token_files

    prefix: Path = arguments.output
    if not prefix.name or prefix.is_dir():
        raise ConfigError(f"--output {str(prefix)!r}: names no files; give a path without suffix, as data/corpus")
    if prefix.suffix in (".bin", ".idx"):
        raise ConfigError(f"--output {prefix}: needs a path without suffix; give {prefix.with_suffix('')}")
    if Path(f"{prefix}.idx").exists() and not arguments.overwrite:
        raise ConfigError(f"--output {prefix}: {prefix}.idx exists already; add --overwrite or give another prefix")
    inputs = list(_files(arguments.inputs))
    tokenizer: Tokenizer = FileTokenizer(arguments.tokenizer) if arguments.tokenizer else ByteTokenizer()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        # Progress counts decompressed bytes of compressed inputs, so the bar may pass its end.
        task = progress.add_task("tokens", total=sum(path.stat().st_size for path in inputs))
        written = build_token_files(
            inputs,
            prefix,
            tokenizer,
            documents=arguments.documents,
            json_key=arguments.json_key,
            on_bytes=lambda nbytes: progress.advance(task, nbytes),
        )
    documents, tokens = counted(written.documents, "document"), counted(written.tokens, "token")
    print(f"{prefix}.bin, .idx: {documents}, {tokens}, including one end token for each document")
    print("train on it with: --data-path", prefix, " ".join(written.train_flags))
    if arguments.json:
        print(json.dumps({**asdict(written), "prefix": str(prefix)}))
    return 0


def _files(inputs: list[Path]) -> Iterator[Path]:
    for path in inputs:
        if path.is_dir():
            texts = sorted(file for file in path.rglob("*") if file.name.endswith(TEXT_SUFFIXES) and file.is_file())
            if not texts:
                raise DataError(
                    f"{path}: no text files in this folder; needs files that end in {', '.join(TEXT_SUFFIXES)}"
                )
            yield from texts
        elif path.exists():
            yield path
        else:
            raise DataError(f"{path}: no such file or folder")
