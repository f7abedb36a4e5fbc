"""Command ``moevement windows``, which lists the windows in a folder of ``--moevement-persist-dir``."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from moevement_core.errors import ConfigError, SnapshotError
from moevement_core.session.run_directory import number
from moevement_core.storage.files import file_name, owner_and_iteration
from moevement_core.storage.folder_store import FolderStore
from moevement_core.storage.locations import check_location
from moevement_core.storage.manifest import Manifest
from moevement_core.storage.places import store_at
from moevement_core.storage.store import WindowStore

LAYOUT = {
    "tensor_model_parallel_size": "tp", "pipeline_model_parallel_size": "pp", "expert_model_parallel_size": "ep",
    "context_parallel_size": "cp",
}  # fmt: skip
"""Short names of Megatron's flags for the sizes of groups; a size of 1 is left out."""


@dataclass(frozen=True)
class WindowRow:
    """Window on disk, as the table shows it."""

    iteration: int
    """Iteration whose state the window restores."""
    loss: float | str | None
    """Loss of that iteration; None if the files in this folder do not have it."""
    ranks: int | None
    """Number of ranks of the job that wrote the window; None if the job did not record it."""
    layout: str
    first: int
    last: int
    """First and last snapshot of the window."""
    nbytes: int
    """Bytes of the window's files in this folder. Windows may share files."""
    written: float | None
    """Time at which the window was complete, in seconds since the epoch; None if the place does not say."""
    job: str


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the description and arguments of ``moevement windows``."""
    parser.description = (
        "List the complete windows in DIR, the newest first: which iteration each restores, the loss of that "
        "iteration, and the layout of the job that wrote it. Start a job from one of them with --moevement-load DIR "
        "--moevement-load-iteration N. If each node has a folder of its own, the loss is known only in the folder of "
        "the last rank."
    )
    parser.add_argument(
        "folder", metavar="DIR", type=partial(check_location, "DIR"),
        help="a folder or a URL of --moevement-persist-dir",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """List the windows; return the exit code.

    Raises:
        ConfigError: the folder does not exist, or holds no windows.
    """
    store = store_at(arguments.folder)
    if isinstance(store, FolderStore) and not store.path.is_dir():
        raise ConfigError(f"{store}: not a folder; give the folder of --moevement-persist-dir")
    try:
        complete, unreadable = store.manifests_and_refused()
        if not complete and not unreadable:
            raise ConfigError(f"{store}: no window; give the folder of --moevement-persist-dir")
        windows = []
        for manifest in complete:
            with suppress(FileNotFoundError):  # a running job has deleted the window meanwhile
                windows.append(_window(store, manifest))
    except OSError as error:
        raise ConfigError(f"{store}: {error.strerror}; give a place that can be read") from None
    if arguments.json:
        print(json.dumps({"windows": [vars(window) for window in windows], "unreadable": unreadable}))
        return 0
    for line in _table(windows):
        print(line)
    for why in unreadable.values():
        print(f"unreadable: {why}")
    return 0


def _window(store: WindowStore, manifest: Manifest) -> WindowRow:
    sizes = store.sizes(manifest.name)
    ranks = manifest.settings.get("world_size")
    return WindowRow(
        iteration=manifest.reaches,
        loss=_loss(store, manifest, sizes),
        ranks=ranks if isinstance(ranks, int) else None,
        layout=_layout(manifest.settings),
        first=manifest.first,
        last=manifest.last,
        nbytes=sum(sizes.values()),
        written=store.written_at(manifest.name),
        job=manifest.job,
    )


def _layout(settings: Mapping[str, Any]) -> str:
    sizes = {short: settings.get(name) for name, short in LAYOUT.items()}
    return " ".join(f"{short}{size}" for short, size in sizes.items() if isinstance(size, int) and size > 1)


def _loss(store: WindowStore, manifest: Manifest, names: Iterable[str]) -> float | str | None:
    """Return the loss of the restored iteration, from the newest snapshot of the highest rank in the place."""
    owners = [named[0] for name in names if (named := owner_and_iteration(name)) and named[1] == manifest.last]
    if not owners:
        return None
    try:
        record = store.record(manifest.name, file_name(max(owners), manifest.last))
    except SnapshotError:
        return None
    losses = record["iteration"].get("losses") or {}
    loss = number(losses.get("lm loss"))
    return loss if loss is None or isinstance(loss, str) else float(loss)


def _table(windows: list[WindowRow]) -> list[str]:
    rows = [["iteration", "loss", "ranks", "layout", "snapshots", "bytes here", "written", "job"]]
    rows += [
        [
            str(window.iteration),
            "-" if window.loss is None else window.loss if isinstance(window.loss, str) else f"{window.loss:.4f}",
            "-" if window.ranks is None else str(window.ranks),
            window.layout or "-",
            f"{window.first} to {window.last}" if window.first < window.last else str(window.last),
            f"{window.nbytes / 1e9:.3g} GB",
            "-" if window.written is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(window.written)),
            window.job,
        ]
        for window in windows
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
