"""Checks of files and folders that have to exist, or that the job has to create."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from moevement_core.monitoring.config import unserved
from moevement_core.util.file_modes import make_folder

_ROOM_BYTES = 128 << 10


def empty_paths(args: Namespace) -> Iterator[str]:
    """Yield complaints about empty paths, which come from variables that are not set.

    As a path, an empty string would mean the current folder.
    """
    for flag in ("run_dir", "save", "load", "moevement_persist_dir", "moevement_load", "moevement_inject_trace"):
        value = getattr(args, flag, None)
        if value is not None and not value.strip():
            yield (
                f"--{flag.replace('_', '-')} {value!r}: the path is empty, perhaps because a variable is not set; give "
                "a path, or leave the flag out"
            )


def data(args: Namespace) -> Iterator[str]:
    """Yield complaints about token files and tokenizers that do not exist, and about an invalid split."""
    from megatron.core.datasets.utils import get_blend_from_list

    for flag in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        blend = get_blend_from_list(getattr(args, flag))
        for prefix in blend[0] if blend else []:
            if "://" in prefix:
                continue
            missing = [suffix for suffix in (".bin", ".idx") if not Path(prefix + suffix).exists()]
            if missing:
                hint = "; leave the suffix out" if prefix.endswith((".bin", ".idx")) else ""
                yield (
                    f"--{flag.replace('_', '-')} {prefix}: no file {prefix}{missing[0]}{hint}; "
                    "`moevement data build` makes .bin and .idx from text"
                )
    if args.data_path and args.split is not None:
        yield from _split(args)
    for flag in ("tokenizer_model", "vocab_file", "merge_file", "data_args_path", "per_split_data_args_path"):
        path = getattr(args, flag, None) or ""
        # A tokenizer may also be named by its repository on a hub, which looks like owner/name.
        is_file = path and (flag != "tokenizer_model" or path.startswith(("/", ".")) or path.count("/") > 1)
        if is_file and not Path(path).exists():
            yield f"--{flag.replace('_', '-')} {path}: no such file; give a path that exists"


def _split(args: Namespace) -> Iterator[str]:
    try:
        shares = [float(share) for share in args.split.split(",")]
    except ValueError:
        shares = []
    if len(shares) != 3 or min(shares) < 0 or sum(shares) <= 0:
        yield f"--split {args.split}: needs the shares of training, validation and test data, as in 95,4,1"
    elif not args.skip_train and shares[0] == 0:
        yield f"--split {args.split}: no share for training; the first number must be positive"
    elif args.eval_iters and shares[1] == 0:
        yield f"--split {args.split}: no share for validation; make the second number positive, or give --eval-iters 0"
    else:
        yield from _empty_shares(args)


def _empty_shares(args: Namespace) -> Iterator[str]:
    """Yield complaints about data sets that would get no document.

    Megatron splits token files by documents, and would search for samples forever in a data set without documents.
    """
    from megatron.core.datasets import blended_megatron_dataset_config as config
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import get_blend_from_list

    shares = config.convert_split_vector_to_split_matrix(config.parse_and_normalize_split(args.split))
    wanted = {0: "training"} if not args.skip_train else {}
    wanted |= {1: "validation", 2: "test"} if args.eval_iters else {}
    for prefix in get_blend_from_list(args.data_path)[0]:
        if "://" in prefix or not all(Path(prefix + suffix).exists() for suffix in (".bin", ".idx")):
            continue
        documents = len(IndexedDataset(prefix).sequence_lengths)
        for place, name in wanted.items():
            share = shares[place]
            if share is not None and round(share[0] * documents) == round(share[1] * documents):
                yield (
                    f"--split {args.split}: none of the {documents} documents of --data-path {prefix} is left for "
                    f"{name}; give it a larger share or none, or build the file with more documents (`moevement data "
                    "build --documents line`)"
                )


def written_folders(args: Namespace) -> Iterator[str]:
    """Yield complaints about folders for output that cannot be created or written."""
    for flag in ("run_dir", "save", "tensorboard_dir"):
        if not (path := getattr(args, flag)):
            continue
        name = f"--{flag.replace('_', '-')} {path}"
        try:
            make_folder(Path(path))
        except OSError as error:
            yield f"{name}: {error.strerror}; give a folder that can be created"
        else:
            if not os.access(path, os.W_OK | os.X_OK):
                yield f"{name}: the folder is not writable; give another folder"
            elif args.rank == 0:
                yield from _full(name, Path(path))


def _full(name: str, folder: Path) -> Iterator[str]:
    """Yield a complaint if a folder's disk lacks space for what the job writes there before it trains."""
    probe = folder / f".moevement-room.{os.getpid()}"
    try:
        probe.write_bytes(bytes(_ROOM_BYTES))
    except OSError as error:
        yield f"{name}: cannot be written ({error.strerror}); give a folder with free space"
    finally:
        probe.unlink(missing_ok=True)


def metrics_endpoint(args: Namespace) -> Iterator[str]:
    """Yield a complaint if the flags ask for a metrics endpoint, but no launcher or coordinator runs to serve it."""
    if (complaint := unserved(args.moevement_metrics_port)) is not None:
        yield complaint


def checkpoints(args: Namespace) -> Iterator[str]:
    """Yield complaints about a checkpoint to load that is incomplete, and about ``--save`` without an interval."""
    from megatron.moevement.runtime import dense_checkpoint

    if args.save and args.save_interval is None and not args.train_samples:
        yield "--save-interval: missing; --save needs the number of iterations from one save to the next"
    if args.load:
        yield from dense_checkpoint.complaints(Path(args.load), args.ckpt_step)
